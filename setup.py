"""The part in C; all else stands in pyproject.toml."""

import sysconfig

from setuptools import Extension, setup

# Without a C compiler samebits works as well; its products take the host longer.
RECALL = Extension("samebits.plans._recall", ["src/samebits/plans/recall.c"], optional=True, py_limited_api=True)

if sysconfig.get_config_var("Py_GIL_DISABLED"):  # there is no limited API, and the part in C relies on the lock
    setup()
else:
    setup(ext_modules=[RECALL], options={"bdist_wheel": {"py_limited_api": "cp311"}})
