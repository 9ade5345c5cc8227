"""The kinds of values that settings hold, as rules: numbers, money, names, times, hashes.

`parse` of each turns the YAML value into the value that contracts hold (money into integer nano-dollars, `unlimited`
into None) or raises ValueError, with a reason where "x is not allowed" does not say enough.
"""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime
from decimal import Decimal
from typing import Annotated, Any
from zoneinfo import ZoneInfo

from rungway.contracts import CLASS_ORDER, NUSD_PER_USD
from rungway.settings.rule import Names, Rule, close, show

COUNT_MAX = 10**12
USD_MAX = 10**9


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value} is not a finite number")
    return value


def whole(low: int = 0, high: int = COUNT_MAX, *, unlimited: bool = False, words: tuple[str, ...] = ()) -> Rule:
    """A whole number; `unlimited` and `words` (such as `auto`) are read as None."""
    words = ("unlimited", *words) if unlimited else words
    bound = f"a whole number from {low} to {high}" if high != COUNT_MAX else f"a whole number, at least {low}"
    allowed = " or ".join([bound, *(f"`{word}`" for word in words)])

    def parse(value: Any, names: Names) -> int | None:
        if isinstance(value, str) and value in words:
            return None
        number = _number(value)
        if not isinstance(number, int) or not low <= number <= high:
            raise ValueError
        return number

    return Rule(allowed, parse, unlimited=unlimited)


def number(low: float = 0.0, high: float = 1e12, *, above: bool = False, words: tuple[str, ...] = ()) -> Rule:
    """A finite number from `low` to `high`; `above`: `low` itself is not allowed. `words` are read as None."""
    bound = f"more than {low:g}" if above else f"at least {low:g}"
    allowed = f"a number, {bound}" + (f" and at most {high:g}" if high < 1e12 else "")
    allowed = " or ".join([allowed, *(f"`{word}`" for word in words)])

    def parse(value: Any, names: Names) -> float | None:
        if isinstance(value, str) and value in words:
            return None
        value = _number(value)
        if not low <= value <= high or (above and value == low):
            raise ValueError
        return float(value)

    return Rule(allowed, parse)


def usd(*, unlimited: bool = False) -> Rule:
    """US dollars, read as integer nano-dollars; finer amounts are refused, not rounded."""
    allowed = "US dollars, at least 0, in steps of 0.000000001" + (", or `unlimited`" if unlimited else "")

    def parse(value: Any, names: Names) -> int | None:
        if unlimited and value == "unlimited":
            return None
        amount = Decimal(repr(_number(value)))
        if not 0 <= amount <= USD_MAX:
            raise ValueError
        nano = amount * NUSD_PER_USD
        if nano != nano.to_integral_value():
            raise ValueError(f"{value!r} is finer than a nano-dollar")
        return int(nano)

    return Rule(allowed, parse, unlimited=unlimited)


def text(allowed: str, pattern: str = r"(?s).+", *, secret: bool = False, null_ok: bool = False) -> Rule:
    compiled = re.compile(pattern)

    def parse(value: Any, names: Names) -> str:
        if not isinstance(value, str) or not compiled.fullmatch(value):
            raise ValueError
        return value

    return Rule(allowed, parse, secret=secret, null_ok=null_ok)


def one_of(*words: str) -> Rule:
    def parse(value: Any, names: Names) -> str:
        if not isinstance(value, str) or value not in words:
            raise ValueError(f"{show(value)} is not allowed{close(str(value), words)}")
        return words[words.index(value)]  # the word itself: an enum member stays one

    return Rule(" | ".join(f"`{word}`" for word in words), parse)


def name_of(kind: str) -> Rule:
    """The name of one of the declared tiers, rungs, plans..."""

    def parse(value: Any, names: Names) -> str:
        if not isinstance(value, str):
            raise ValueError
        _known([value], kind, names)
        return value

    return Rule(f"the name of one of the {kind}", parse, names=kind)


def names_of(kind: str, *, all_word: bool = False, at_least: int = 0, unique: bool = True) -> Rule:
    """A list of names; with `all_word`, the word `all` is read as None."""
    allowed = f"a list of names of {kind}" + (", or `all`" if all_word else "") + (", not empty" if at_least else "")

    def parse(value: Any, names: Names) -> tuple[str, ...] | None:
        if all_word and value == "all":
            return None
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value) or len(value) < at_least:
            raise ValueError
        if unique and len(set(value)) != len(value):
            raise ValueError("a name stands in it twice")
        _known(value, kind, names)
        return tuple(value)

    return Rule(allowed, parse, names=kind)


def _known(values: list[str], kind: str, names: Names) -> None:
    known = names.of(kind)
    unknown = [value for value in values if known is not None and value not in known]
    if unknown and known is not None:
        shown = ", ".join(f"`{value}`" for value in unknown)
        raise ValueError(f"{shown} is not one of the {kind}: {', '.join(known) or 'none'}{close(unknown[0], known)}")


def words_of(*words: str) -> Rule:
    """A list of words out of a fixed set, not empty."""

    def parse(value: Any, names: Names) -> tuple[str, ...]:
        if not isinstance(value, list) or not value or any(item not in words for item in value):
            raise ValueError
        return tuple(word for word in words if word in value)

    return Rule("a list of " + ", ".join(f"`{word}`" for word in words), parse)


def flag() -> Rule:
    def parse(value: Any, names: Names) -> bool:
        if not isinstance(value, bool):
            raise ValueError
        return value

    return Rule("`true` or `false`", parse)


def plain_mapping() -> Rule:
    def parse(value: Any, names: Names) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise ValueError
        return value

    return Rule("a mapping", parse)


def instant() -> Rule:
    """A moment as nanoseconds since the epoch; without a zone it is UTC, a date alone is its first moment."""

    def parse(value: Any, names: Names) -> int:
        if not isinstance(value, str):
            raise ValueError
        moment = datetime.fromisoformat(value)
        moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
        return int(moment.timestamp()) * 1_000_000_000

    return Rule("an ISO 8601 time such as 2027-12-31T00:00:00Z", parse)


def zone() -> Rule:
    def parse(value: Any, names: Names) -> str:
        if not isinstance(value, str):
            raise ValueError
        if value != "UTC":
            try:
                ZoneInfo(value)
            except (OSError, LookupError, ValueError) as error:
                raise ValueError(f"there is no timezone {show(value)}") from error
        return value

    return Rule("an IANA timezone such as UTC or Europe/Berlin", parse)


EMPTY_SHA256 = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


def sha256_hex() -> Rule:
    def parse(value: Any, names: Names) -> str:
        if not isinstance(value, str) or not re.fullmatch(r"[0-9a-fA-F]{64}", value):
            raise ValueError("this is not a SHA-256 in hex")
        if value.lower() == EMPTY_SHA256:
            raise ValueError("this is the hash of an empty key")
        return value.lower()

    return Rule("64 hex characters, from `rungway keys hash`; never the key itself", parse, secret=True)


def source(*, null_ok: bool = False) -> Rule:
    pattern = r"hf:[\w.-]+/[\w.-]+(@[\w./-]+)?|path:.+|pypi:[A-Za-z0-9][\w.-]*==[\w.!+]+"
    return text("`hf:org/name[@revision]`, `path:/dir-or-file` or `pypi:name==version`", pattern, null_ok=null_ok)


def database() -> Rule:
    allowed = "`sqlite`, `sqlite:///file` or `postgresql://user@host/db`"
    return text(allowed, r"sqlite|sqlite:///.+|postgresql(\+psycopg)?://.+", secret=True)


TENANT_NAME = r"[a-z][a-z0-9-]{0,40}"
NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
CLASSES = one_of(*CLASS_ORDER)

Count = Annotated[int, whole(1)]
CountOrZero = Annotated[int, whole(0)]
Limit = Annotated[int | None, whole(0, unlimited=True)]
Share = Annotated[float, number(0, 1)]
Positive = Annotated[float, number(0, above=True)]
NotNegative = Annotated[float, number(0)]
Usd = Annotated[int, usd()]
UsdLimit = Annotated[int | None, usd(unlimited=True)]
Flag = Annotated[bool, flag()]
Name = Annotated[str, text("a name of letters, digits, `.`, `_`, `-` (at most 64)", NAME)]
ModelName = Annotated[
    str, text("a name of letters, digits, `.`, `_`, `-`, `:`, `/` (at most 128)", r"[A-Za-z0-9][\w.:/-]{0,127}")
]
TenantName = Annotated[str, text("a name such as acme-2: `[a-z][a-z0-9-]{0,40}`", TENANT_NAME)]
KeyId = Annotated[
    str,
    text("a name of letters, digits, `.`, `_`, `-` (at most 64) that is not a key", rf"(?!rw_){NAME}", secret=True),
]
