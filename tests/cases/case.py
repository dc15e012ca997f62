from collections.abc import Sequence
from typing import NamedTuple


class Case(NamedTuple):
    kind: str
    """What goes wrong."""
    tests: Sequence[str] = ()
    """`file::test`, files below tests/."""
    remark: str = ""
    """Where there is no such thing here, why; else what is otherwise than the report expects."""
