"""Libraries that a process imports late, or without what they bring along, work as they do elsewhere."""

from __future__ import annotations

import subprocess
import sys

PANDAS = """
import sys
from tailorfl.runs.process import import_pandas
import_pandas()
import pandas as pd
from pathlib import Path
assert "pyarrow" not in sys.modules
frame = pd.read_csv("written.csv")
frame.to_parquet("light.parquet")
same = pd.read_parquet("light.parquet")
pd.testing.assert_frame_equal(frame, same)
same.to_csv("light.csv", index=False)
assert Path("light.csv").read_bytes() == Path("written.csv").read_bytes()
assert str(frame.dtypes["word"]) == str(pd.Series(["a"]).dtype)
"""
TENSORDICT = """
import sys
import torch
marks = torch.compiler.allow_in_graph, torch.compiler.assume_constant_result
from tailorfl.runs.process import import_tensordict
import_tensordict()
from tensordict import TensorDict
assert "torch._dynamo" not in sys.modules
assert marks == (torch.compiler.allow_in_graph, torch.compiler.assume_constant_result)
twice = TensorDict({"a": torch.ones(2)}, [2]) + TensorDict({"a": torch.ones(2)}, [2])
assert twice["a"].tolist() == [2.0, 2.0]

from tailorfl.core import method
assert "tailorfl.methods" not in sys.modules, "importing the core imports the methods"
names = set(method.methods())
from pathlib import Path
import tailorfl.methods
for file in Path(tailorfl.methods.__file__).parent.glob("*.py"):
    assert f"tailorfl.methods.{file.stem}" in sys.modules or file.stem == "__init__", file
assert {"local", "fedavg", "ditto"} <= names

import logging
from importlib.util import find_spec
from tailorfl.privacy import epsilon
if find_spec("opacus"):
    epsilon([(1.0, 1.0, 1)], 1e-5)
assert not logging.getLogger().handlers, "opacus sets up logging"
"""
"""The methods are imported when they are first asked for, and accountants leave logging alone."""


def test_light_imports_leave_libraries_whole(tmp_path):
    (tmp_path / "written.csv").write_text("number,word\n1,north\n2,\n3,café\n")
    program = PANDAS + TENSORDICT
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
