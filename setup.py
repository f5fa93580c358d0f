"""What is made when a wheel is built (`make wheel`): the native kernels for every instruction set of this architecture,
and the console's browser libraries. Everything else about the package is in pyproject.toml.

Without a C++ compiler the wheel is a pure one, and the engine compiles its kernels where it runs. An editable install
(a clone) gets neither: kernels and libraries are made on first use, into the user's cache.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
KERNELS = "penstock/engine/backends/cpu/prebuilt"
COMPILER = any(shutil.which(name) for name in filter(None, (os.environ.get("CXX"), "c++", "g++", "clang++")))


def script(path: str, *arguments: str) -> None:
    """Run one of Penstock's scripts that need nothing but Python."""
    paths = [str(ROOT), *filter(None, (os.environ.get("PYTHONPATH"),))]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run([sys.executable, "-P", str(ROOT / path), *arguments], env=environment, check=False)
    if done.returncode:
        sys.exit(f"{path} failed; see above")


class Build(build_py):
    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        built = Path(self.build_lib)
        shutil.rmtree(built / KERNELS, ignore_errors=True)
        script("penstock/console/libraries.py", "--output", str(built / "penstock/console/lib"))
        if COMPILER:
            script("penstock/engine/backends/cpu/build.py", "--all", "--output", str(built / KERNELS))
        else:
            print("No C++ compiler: a wheel without native kernels, which are then compiled where it runs.")


class Wheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        built = list(Path(self.get_finalized_command("build").build_lib, KERNELS).glob("*.so"))
        if not built:  # an editable install, or no compiler
            return super().get_tag()
        # The kernels are loaded with ctypes: any Python will do, and any system with a C library as new as they need.
        machine = sysconfig.get_platform().rpartition("-")[2]
        needed = [tuple(map(int, pair)) for pair in re.findall(rb"GLIBC_(\d+)\.(\d+)", built[0].read_bytes())]
        if not sys.platform.startswith("linux") or not needed:
            return "py3", "none", re.sub(r"[-.]", "_", sysconfig.get_platform())
        major, minor = max(needed)
        return "py3", "none", f"manylinux_{major}_{minor}_{machine}"


class Package(Distribution):
    def has_ext_modules(self) -> bool:
        return COMPILER


setup(cmdclass={"build_py": Build, "bdist_wheel": Wheel}, distclass=Package)
