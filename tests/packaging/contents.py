"""Hold the contents of a built sdist and wheel to the checkout that they were built from.

python contents.py CHECKOUT SDIST WHEEL
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

NOT_SHIPPED = {".gitignore"}


def tracked(checkout: Path) -> set[str]:
    done = subprocess.run(
        ["git", "-C", checkout, "ls-files"], capture_output=True, text=True, check=True
    )
    return set(done.stdout.split("\n")) - {""} - NOT_SHIPPED


def check_sdist(files: set[str], sdist: Path) -> int:
    with tarfile.open(sdist) as archive:
        names = {m.name.partition("/")[2] for m in archive.getmembers() if m.isfile()}
    missing = sorted(files - names)
    assert not missing, f"the sdist lacks {', '.join(missing)}"
    binaries = [name for name in names if name.endswith((".so", ".o", ".pyc"))]
    assert not binaries, f"the sdist has {', '.join(binaries)}"
    return len(names)


def check_wheel(files: set[str], wheel: Path) -> int:
    names = set(zipfile.ZipFile(wheel).namelist())
    wanted = {name for name in files if name.startswith("dgmoe_ops/")} | {"dgmoe_ops/_C.abi3.so"}
    missing = sorted(wanted - names)
    assert not missing, f"the wheel lacks {', '.join(missing)}"
    others = sorted(name for name in names if not name.startswith(("dgmoe_ops/", "dgmoe_ops-")))
    assert not others, f"the wheel has {', '.join(others)}"
    assert any(name.endswith("licenses/LICENSE") for name in names), "the wheel lacks LICENSE"
    assert wheel.name.split("-")[2:4] == ["cp310", "abi3"], f"{wheel.name} is not cp310-abi3"
    return len(names)


def main() -> None:
    checkout, sdist, wheel = map(Path, sys.argv[1:])
    files = tracked(checkout)
    print(f"{sdist.name}: {check_sdist(files, sdist)} files")
    print(f"{wheel.name}: {check_wheel(files, wheel)} files")


if __name__ == "__main__":
    main()
