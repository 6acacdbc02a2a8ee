"""The check of the built pages finds each fault that Sphinx lets pass."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_spec = importlib.util.spec_from_file_location("check_html", ROOT / "book" / "check_html.py")
check_html = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(check_html)

GOOD = (
    '<h1 id="top">T</h1><a href="b.html#there">b</a><a href="#top">up</a><a href="https://x.y">x</a>'
    '<div class="cell_output"><figure><img src="a.svg" alt="a line"><figcaption>c</figcaption>'
    "</figure></div>"
)


def problems(folder, page):
    (folder / "a.html").write_text(page)
    (folder / "b.html").write_text('<p id="there">b</p>')
    (folder / "a.svg").write_text("<svg/>")
    return check_html.find_problems(folder)


def test_a_good_page_passes(tmp_path):
    assert problems(tmp_path, GOOD) == []


@pytest.mark.parametrize(
    ("good", "bad", "says"),
    [
        ('href="b.html#there"', 'href="c.html"', "the link c.html leads nowhere"),
        ('href="b.html#there"', 'href="b.html#gone"', "b.html#gone has no such anchor"),
        ('href="#top"', 'href="#gone"', "#gone has no such anchor"),
        ('src="a.svg"', 'src="missing.svg"', "the link missing.svg leads nowhere"),
        (' alt="a line"', "", "no alt text: a.svg"),
        ('alt="a line"', 'alt="_images/a.svg"', "no alt text: a.svg"),
        ("<figcaption>c</figcaption>", "", "no caption: a.svg"),
        (
            "<h1",
            '<script src="https://cdn.x/y.js"></script><h1',
            "https://cdn.x/y.js is on another",
        ),
        ("<h1", '<div class="output traceback">E</div><h1', "a cell of this page failed"),
    ],
)
def test_a_fault_is_named(tmp_path, good, bad, says):
    """S4.2 and S4.6 among them: failed cells, pictures that are not there."""
    assert good in GOOD
    (found,) = problems(tmp_path, GOOD.replace(good, bad, 1))
    assert found.startswith("a.html: ")
    assert says in found


def test_an_empty_folder_is_no_book(tmp_path):
    with pytest.raises(ValueError, match="folder with HTML pages"):
        check_html.find_problems(tmp_path)
