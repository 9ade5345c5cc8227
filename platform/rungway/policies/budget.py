"""Money per calendar window: windows in the tenant's own time zone, and a meter of what is spent and held.

Money is integer nano-dollars, wall time integer nanoseconds since the Unix epoch.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import date, datetime, timedelta
from zoneinfo import ZoneInfo

from rungway.contracts import Budget

_NS_PER_S = 1_000_000_000


def _next_month(day: date) -> date:
    return date(day.year + day.month // 12, day.month % 12 + 1, 1)


# per -> (first day of the period that holds a day, first day of the next period)
_PERIODS: dict[str, tuple[Callable[[date], date], Callable[[date], date]]] = {
    "day": (lambda day: day, lambda first: first + timedelta(days=1)),
    "week": (lambda day: day - timedelta(days=day.weekday()), lambda first: first + timedelta(days=7)),
    "month": (lambda day: day.replace(day=1), _next_month),
}


def window(per: str, timezone: str, wall_ns: int) -> tuple[int, int]:
    """The calendar day, ISO week or month that holds `wall_ns`, as [start, end) in wall nanoseconds.

    A window starts at the first local midnight of its first day (or where the clock lands if daylight saving skips
    midnight); windows tile time without a gap, also where a zone repeats an hour or skips a day. Raises KeyError for an
    unknown `per` and ZoneInfoNotFoundError for an unknown zone; the settings have checked both.
    """
    first_of, next_of = _PERIODS[per]
    zone = ZoneInfo(timezone)
    first = first_of(datetime.fromtimestamp(wall_ns // _NS_PER_S, zone).date())
    start, end = _midnight_ns(first, zone), _midnight_ns(next_of(first), zone)
    if wall_ns >= end:
        # The clock was set back across midnight: the repeated evening belongs to the window that already began.
        start, end = end, _midnight_ns(next_of(next_of(first)), zone)
    return start, end


def _midnight_ns(day: date, zone: ZoneInfo) -> int:
    return int(datetime(day.year, day.month, day.day, tzinfo=zone).timestamp()) * _NS_PER_S


class BudgetMeter:
    """Spent and held money of one tenant in the current window; rolls over to the next one by itself.

    Holds carry over a roll, and a cost counts in the window in which it is settled, as in the ledger. The meter never
    returns to an earlier window: a wall clock that steps back finds the money of the later window still spent.
    """

    __slots__ = ("_budget", "_end_ns", "_held", "_spent", "_start_ns")

    def __init__(self, budget: Budget, wall_ns: int) -> None:
        self._budget = budget
        self._held = 0
        self._spent = 0
        self._start_ns, self._end_ns = window(budget.per, budget.timezone, wall_ns)

    @property
    def limit(self) -> int | None:
        """Nano-dollars per window; None = unlimited."""
        return self._budget.nusd

    @property
    def spent(self) -> int:
        """Nano-dollars settled in the window of the last call that carried a time."""
        return self._spent

    @property
    def held(self) -> int:
        """Nano-dollars reserved by requests that have not been settled."""
        return self._held

    @property
    def bounds(self) -> tuple[int, int]:
        """[start, end) of the window in wall nanoseconds."""
        return self._start_ns, self._end_ns

    def fits(self, nusd: int, wall_ns: int) -> bool:
        """Whether spent + held + `nusd` stays within the limit, exactly. What costs nothing more (`nusd` <= 0, such
        as a move to a cheaper offer) always fits, except into a budget of 0, which allows nothing."""
        limit = self._budget.nusd
        if limit is None:
            return True
        self._roll(wall_ns)
        if nusd <= 0:
            return limit > 0
        return self._spent + self._held + nusd <= limit

    def hold(self, nusd: int, wall_ns: int) -> None:
        """Reserve `nusd`, checked or not (a top-up while streaming is not refused)."""
        self._roll(wall_ns)
        self._held += nusd

    def settle(self, held_nusd: int, cost_nusd: int, wall_ns: int) -> None:
        """Replace a hold by what the request really cost (0 = the hold simply comes back)."""
        self._roll(wall_ns)
        assert self._held >= held_nusd, "settled more than was held"
        self._held -= held_nusd
        self._spent += cost_nusd

    def enter(self, wall_ns: int) -> tuple[int, int]:
        """Be in the window of `wall_ns`, or the present one where that is later; its bounds."""
        self._roll(wall_ns)
        return self.bounds

    def restore(self, spent_nusd: int, wall_ns: int) -> None:
        """Set what the ledger says was spent in the current window (start-up, or after the period was changed)."""
        self._roll(wall_ns)
        self._spent = spent_nusd

    def reset_s(self, wall_ns: int) -> float:
        """Seconds until the next window starts."""
        self._roll(wall_ns)
        return (self._end_ns - wall_ns) / _NS_PER_S

    def same_period(self, budget: Budget) -> bool:
        """Whether its windows would be the present ones."""
        return (budget.per, budget.timezone) == (self._budget.per, self._budget.timezone)

    def reload(self, budget: Budget, wall_ns: int) -> None:
        """Take a new limit or period. Spent and held stay; after a change of period the caller restores the spent
        amount of the new window from the ledger."""
        self._roll(wall_ns)
        if not self.same_period(budget):
            self._start_ns, self._end_ns = window(budget.per, budget.timezone, max(wall_ns, self._start_ns))
        self._budget = budget

    def _roll(self, wall_ns: int) -> None:
        if wall_ns >= self._end_ns:
            self._start_ns, self._end_ns = window(self._budget.per, self._budget.timezone, wall_ns)
            self._spent = 0
