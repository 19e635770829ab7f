"""Builds the C core; everything else is said in pyproject.toml.

PHALANX_PURE_WHEEL=1 builds without it, whatever the system: the wheel for systems that are not Linux. There, and where
no compiler is found, the package installs without the core and every collective runs over Gloo.
"""

import os
import sys
import sysconfig

from setuptools import Extension, setup

if sysconfig.get_config_var("Py_GIL_DISABLED"):
    sys.exit(
        "Phalanx does not support free-threaded Python: its core uses the stable interface, and nobody has tried it."
        " Use an ordinary build: python3.14, not python3.14t."
    )

# The core needs futex and memfd: Linux only.
HAS_CORE = sys.platform == "linux" and os.environ.get("PHALANX_PURE_WHEEL") != "1"
SOURCES = sorted(os.path.join("csrc", name) for name in os.listdir("csrc") if name.endswith(".c"))

core = Extension(
    "phalanx._core",
    sources=SOURCES,
    depends=sorted(os.path.join("csrc", name) for name in os.listdir("csrc") if name.endswith(".h")),
    include_dirs=["csrc"],
    define_macros=[("Py_LIMITED_API", "0x030A0000"), ("_GNU_SOURCE", "1")],
    extra_compile_args=["-std=c11", "-O3", "-Wall", "-Wextra", "-fvisibility=hidden", "-ffp-contract=off", "-pthread"],
    py_limited_api=True,
    optional=True,
)

setup(
    ext_modules=[core] if HAS_CORE else [],
    options={"bdist_wheel": {"py_limited_api": "cp310"}} if HAS_CORE else {},
)
