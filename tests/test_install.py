"""eyas installs and imports with its compiled module and without it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from eyas.native import cpu_features

ROOT = Path(__file__).parents[1]
FEATURES = ["avx2", "fma", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "avx512_vnni"]


def run(*args: str | Path, **env: str) -> str:
    """Standard output of a Python run; what went wrong is in the failure's message."""
    done = subprocess.run(
        [sys.executable, *map(str, args)], env=os.environ | env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def can_compile() -> bool:
    compilers = [os.environ.get("CXX", ""), "c++", "g++", "clang++"]
    headers = Path(sysconfig.get_path("include"), "Python.h")
    wanted = "EYAS_NO_NATIVE" not in os.environ
    return wanted and headers.exists() and any(map(shutil.which, compilers))


def test_cpu_features_are_those_of_the_kernel() -> None:
    features = cpu_features()
    if features is None:
        assert not can_compile(), "a compiler is here, and yet the install has no compiled module"
        pytest.skip("no compiler here")
    assert list(features) == FEATURES
    assert all(type(usable) is bool for usable in features.values())

    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text().splitlines()
        flags = next((line.split(":")[1].split() for line in lines if line.startswith("flags")), [])
        assert features == {name: name in flags for name in FEATURES}


def test_imports_without_the_compiled_module() -> None:
    code = (
        "import sys; sys.modules['eyas._native'] = None\n"  # None makes the import statement fail
        "import eyas, eyas.native; print(eyas.native.cpu_features())"
    )
    assert run("-c", code) == "None"


FALSE = shutil.which("false") or "/bin/false"


@pytest.mark.parametrize(
    "env",
    [
        pytest.param({"CC": FALSE, "CXX": FALSE}, id="no compiler"),
        pytest.param({"EYAS_NO_NATIVE": "1"}, id="native module switched off"),
    ],
)
def test_builds_and_installs_without_the_compiled_module(env: dict[str, str], tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    # Not the weights, which are large: a small stand-in shows that data files get into the wheel.
    skip = shutil.ignore_patterns("__pycache__", "*.so", "*.pyd", "*.safetensors")
    shutil.copytree(ROOT / "src", tree / "src", ignore=skip)
    for name in ["pyproject.toml", "CMakeLists.txt", "README.md", "LICENSE", ".gitignore"]:
        shutil.copy(ROOT / name, tree)
    (tree / "src/eyas/heads/stand-in").mkdir(parents=True)
    (tree / "src/eyas/heads/stand-in/head.safetensors").write_bytes(b"weights")

    pip = ["-m", "pip", "--quiet", "--disable-pip-version-check"]
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path, tree, **env)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")

    inside = zipfile.ZipFile(wheel).namelist()
    ours = [path.relative_to(tree / "src") for path in (tree / "src/eyas").rglob("*") if path.is_file()]
    assert Path("eyas/__init__.py") in ours
    assert {path.as_posix() for path in ours} <= set(inside)
    assert not [name for name in inside if name.endswith((".so", ".pyd"))]

    target = tmp_path / "target"
    run(*pip, "install", "--no-deps", "--target", target, wheel)
    # -S, and the search path by hand: an editable install's import hook would come first otherwise.
    code = (
        "import sys; sys.path[:0] = sys.argv[1:]\n"
        "import eyas, eyas.native; print(eyas.native.cpu_features(), eyas.__file__)"
    )
    assert run("-S", "-c", code, target, *sys.path) == f"None {target / 'eyas/__init__.py'}"


def test_training_asks_for_little() -> None:
    """A machine with PyTorch and transformers runs the source tree: nothing else is imported before it is used."""
    optional = ["gguf", "accelerate", "jinja2", "llguidance", "tensorboard", "datasets", "openvino", "eyas._native"]
    lines = ("import sys", f"sys.modules.update(dict.fromkeys({optional}))", "from eyas.cli import main")
    code = "; ".join((*lines, "main(['train', '--help'])"))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and "--shard-mb" in done.stdout, done.stderr
