"""The part in C; all else stands in pyproject.toml."""

from setuptools import Extension, setup

# Without a C compiler samebits works as well; its products take the host longer.
RECALL = Extension("samebits.plans._recall", ["src/samebits/plans/recall.c"], optional=True, py_limited_api=True)

setup(ext_modules=[RECALL], options={"bdist_wheel": {"py_limited_api": "cp311"}})
