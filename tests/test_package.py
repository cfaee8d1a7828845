"""The public names of the package."""

from __future__ import annotations

import subprocess
import sys

import pytest

import dspark


@pytest.mark.parametrize("name", dspark.__all__)
def test_public_names_exist(name):
    assert getattr(dspark, name) is not None
    assert name in dir(dspark)


def test_unknown_names_are_attribute_errors():
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = dspark.nothing


def test_importing_the_package_does_not_import_torch():
    subprocess.run([sys.executable, "-c", "import sys, dspark; assert 'torch' not in sys.modules"], check=True)
