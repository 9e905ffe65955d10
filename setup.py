"""The packages, of which `candidates/` lies beside the others. All else stands in pyproject.toml."""

from setuptools import find_packages, setup

# `hf_smartspec/candidates` is a symbolic link that lets an uninstalled checkout be imported; an archive has none.
OTHERS = find_packages(include=["hf_smartspec*"], exclude=["hf_smartspec.candidates*"])
CANDIDATES = [f"hf_smartspec.candidates.{name}" for name in find_packages("candidates")]

setup(packages=[*OTHERS, "hf_smartspec.candidates", *CANDIDATES])
