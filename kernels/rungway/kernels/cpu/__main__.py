"""`python -m rungway.kernels.cpu`: compiles the kernels ahead of the first start, or says why there are none. Never fails: the
engine computes with torch then."""

from __future__ import annotations

from rungway.kernels.cpu.bindings import library
from rungway.kernels.cpu.build import BuildError, built


def main() -> None:
    try:
        library()
        print(f"own CPU kernels: {built()}")
    except BuildError as error:
        print(f"own CPU kernels are not used: {error}")


if __name__ == "__main__":
    main()
