"""Package definition. The base install asks for numpy and pyzmq only.

torch, Transformer Engine, NVIDIA's Apex and Megatron come with the user's own environment (a wheel, a container, a
source checkout), so installing RRFP must never replace them. `apex` is not an extra either: the registry's package of
that name is an unrelated project.
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).resolve().parent
README = HERE / "README.md"

setup(
    name="rrfp",
    version=re.search(r'^__version__ = "(.+)"', (HERE / "rrfp/__init__.py").read_text(), re.M)[1],
    description="Pipeline-parallel training by readiness, as a drop-in for Megatron-LM",
    long_description=README.read_text() if README.exists() else "",
    long_description_content_type="text/markdown",
    packages=find_packages(include=["rrfp", "rrfp.*"]),
    package_data={"rrfp.report": ["*.html", "*.css", "*.js"], "rrfp.program": ["*.json"]},
    python_requires=">=3.12",
    install_requires=["numpy>=1.26", "pyzmq>=25.1"],
    extras_require={
        # what megatron.training needs beside torch: yaml (0.17, 0.18), psutil (torch_dist checkpoints)
        "megatron": ["megatron-core>=0.17.1,<0.20", "pyyaml>=6", "psutil>=5.9"],
        "plot": ["matplotlib>=3.8"],
        # images for scripts/pretrain_vlm.py: scikit-learn's own, or a WebDataset through Megatron-Energon
        "multimodal": ["scikit-learn>=1.3", "pillow>=10"],
        "energon": ["megatron-energon>=6", "pillow>=10"],
        "program": ["jsonschema>=4.20"],  # strategies as files
        "test": ["jsonschema>=4.20", "pytest>=8.0", "pytest-timeout>=2.2", "hypothesis>=6.100", "psutil>=5.9", "scikit-learn>=1.3", "pillow>=10"],
    },
    entry_points={"console_scripts": ["rrfp = rrfp.cli:main"]},
)
