"""How processes end."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

ENDING = """
import atexit
from trainers.ranks import leave_process
atexit.register(print, "torn down")
print("said")
leave_process(3)
"""


@pytest.mark.parametrize(("num_ranks", "code", "said"), [("2", 3, "said\n"), ("1", 0, "said\ntorn down\n")])
def test_a_rank_of_many_ends_without_teardown_and_one_alone_as_usual(num_ranks: str, code: int, said: str) -> None:
    environment = os.environ | {"RANK": "0", "WORLD_SIZE": num_ranks}
    done = subprocess.run([sys.executable, "-c", ENDING], capture_output=True, text=True, timeout=100, env=environment)
    assert (done.returncode, done.stdout) == (code, said), done.stderr
