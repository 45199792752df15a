"""Scripts that train the digits and do without scikit-learn, whose import takes longer than their training.

The digits are those of its file.
"""

from __future__ import annotations

PRELUDE = """
import gzip, importlib.util, sys, types
import numpy

(folder,) = importlib.util.find_spec("sklearn").submodule_search_locations


def load_digits():
    with gzip.open(folder + "/datasets/data/digits.csv.gz", "rt") as file:
        rows = numpy.loadtxt(file, delimiter=",")
    return types.SimpleNamespace(data=rows[:, :-1], target=rows[:, -1].astype(int))


sys.modules["sklearn"] = types.ModuleType("sklearn")
datasets = sys.modules["sklearn.datasets"] = types.ModuleType("sklearn.datasets")
datasets.load_digits = load_digits
"""


def digits_alone(script: str) -> str:
    """Return the script with the digits of scikit-learn's file.

    Args:
        script: a program's text, without `from __future__ import`, which takes nothing but `load_digits` of
            scikit-learn.
    """
    return PRELUDE + script
