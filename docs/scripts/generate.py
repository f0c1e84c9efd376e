"""What mkdocs runs before it builds: writes the generated pages of the reference."""

import sys
from pathlib import Path

import mkdocs_gen_files

sys.path.insert(0, str(Path(__file__).parents[2]))

from docs.scripts.reference import pages  # noqa: E402

for path, text in pages().items():
    with mkdocs_gen_files.open(path, "w") as file:
        file.write(text)
