"""Draw the pictures of the guides: run the Python of each page that saves one, as a reader would.

`python scripts/page_pictures.py` writes docs/images/NAME.png for each `savefig("NAME.png")`.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def main() -> None:
    os.environ["MPLBACKEND"] = "Agg"  # no window
    for page in sorted((ROOT / "docs").glob("*.md")):
        code = "\n".join(BLOCK.findall(page.read_text(encoding="utf-8")))
        pictures = re.findall(r'savefig\("([\w-]+\.png)"\)', code)
        if pictures:
            with tempfile.TemporaryDirectory() as folder:
                os.chdir(folder)
                exec(compile(code, page.name, "exec"), {"__name__": "page"})
                for picture in pictures:
                    shutil.copy(picture, ROOT / "docs" / "images" / picture)
                os.chdir(ROOT)


if __name__ == "__main__":
    main()
