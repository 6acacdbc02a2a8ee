"""Check a built book for what Sphinx lets pass: ``python book/check_html.py _build/html``.

Every local link and its anchor must exist, every image must have an alt text, a notebook's figure
a caption; no page may hold an error, or load anything from another server.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

from bs4 import BeautifulSoup, Tag


def find_problems(root: Path) -> list[str]:
    """One line a problem, of all pages below ``root``; ValueError if there is no page."""
    root = root.resolve()
    paths = [path for path in root.rglob("*.html") if "_static" not in path.relative_to(root).parts]
    if not paths:
        raise ValueError(f"root must be a folder with HTML pages, got {root}")
    pages = {
        path: BeautifulSoup(path.read_text(encoding="utf-8"), "html.parser")
        for path in sorted(paths)
    }
    anchors = {path: {tag["id"] for tag in page.find_all(id=True)} for path, page in pages.items()}
    return [
        f"{path.relative_to(root)}: {problem}"
        for path, page in pages.items()
        for problem in (*_broken_links(path, page, anchors), *_faults(page))
    ]


def _broken_links(path: Path, page: BeautifulSoup, anchors: dict[Path, set[str]]) -> Iterator[str]:
    for tag in page.find_all(lambda tag: tag.get("href") or tag.get("src")):
        link = tag.get("href") or tag.get("src")
        url = urlsplit(link)
        if url.netloc or url.scheme:
            if tag.name != "a" and url.netloc and tag.get("rel") != ["canonical"]:
                yield f"{link} is on another server"
            continue
        target = (path.parent / unquote(url.path)).resolve() if url.path else path
        if not target.exists():
            yield f"the link {link} leads nowhere"
        elif url.fragment and target in anchors and url.fragment not in anchors[target]:
            yield f"the link {link} has no such anchor"


def _faults(page: BeautifulSoup) -> Iterator[str]:
    for image in page.find_all("img"):
        source, alt = image.get("src", ""), image.get("alt", "").strip()
        if not alt or Path(alt).name == Path(source).name:
            yield f"no alt text: {source}"
        if _within(image, "div", "cell_output") and not _captioned(image):
            yield f"no caption: {source}"
    if page.find(class_="traceback"):
        yield "a cell of this page failed"


def _within(tag: Tag, name: str, css_class: str) -> bool:
    return tag.find_parent(name, class_=css_class) is not None


def _captioned(image: Tag) -> bool:
    figure = image.find_parent("figure")
    return figure is not None and figure.find("figcaption") is not None


if __name__ == "__main__":
    found = find_problems(Path(sys.argv[1]))
    for line in found:
        print(line)
    sys.exit(1 if found else 0)
