"""Hooks of mkdocs: README, CONTRIBUTING and CHANGELOG are pages of the site, too."""

import re
import subprocess
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")


def on_config(config):
    """Links to the repository from which this clone was made."""
    command = ["git", "-C", str(ROOT), "remote", "get-url", "origin"]
    url = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    if match := re.fullmatch(r"(?:https://|git@)([\w.-]+)[:/](.+?)(?:\.git)?/?", url):
        config.repo_url = "https://{}/{}".format(*match.groups())
        config.repo_name = match[2]
    return config


def on_files(files, config):
    for name in PAGES:
        files.append(File.generated(config, name.lower(), abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown, page, config, files):
    """Points links between docs/ and the root at pages of the site, others at the repository."""

    def target(match):
        path, anchor = match[1], match[2] or ""
        if "://" in path:
            return match[0]
        is_root = page.file.src_uri in [name.lower() for name in PAGES]
        source = ROOT if is_root else ROOT / "docs" / Path(page.file.src_uri).parent
        file = (source / path).resolve()
        if file.name in PAGES and file.parent == ROOT:
            up = "../" * page.file.src_uri.count("/")
            return f"]({up}{file.name.lower()}{anchor})"
        if is_root and file.is_relative_to(ROOT / "docs"):
            return f"]({file.relative_to(ROOT / 'docs')}{anchor})"
        if is_root and file.exists():
            return f"]({config.repo_url or ''}/blob/main/{file.relative_to(ROOT)})"
        return match[0]

    # CONTRIBUTING names its examples for their tests: ```python layer
    markdown = re.sub(r"^(```\w+) \w+$", r"\1", markdown, flags=re.MULTILINE)
    return re.sub(r"\]\(([\w./:-]+)(#[\w-]+)?\)", target, markdown)
