"""The wheel has no code for one version of Python: it is for every Python of a platform."""

import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

sys.path.insert(0, str(Path(__file__).parent))
from build_library import build
from onnxfit_kernels import LIBRARY


class BuildLibrary(build_py):
    def run(self):
        super().run()
        build(Path(self.build_lib).resolve() / "onnxfit_kernels" / LIBRARY.name)


class PlatformWheel(bdist_wheel):
    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


class PlatformDistribution(Distribution):
    def has_ext_modules(self):
        return True


setup(
    cmdclass={"build_py": BuildLibrary, "bdist_wheel": PlatformWheel},
    distclass=PlatformDistribution,
)
