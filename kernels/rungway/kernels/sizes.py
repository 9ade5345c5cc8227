"""Sizes that callers of the kernels have to keep to. Importing this needs no Triton."""

from __future__ import annotations

QUERIES_MAX = 8  # of one sequence in decode attention: speculative verification, the end of a prompt
ROWS_MAX = 64  # queries * query heads of a kv head in one tile of decode attention


def queries_max(group: int) -> int:
    """Queries of one sequence that decode attention takes, for `group` query heads of each kv head; at least one."""
    return max(1, min(QUERIES_MAX, ROWS_MAX // group))
