"""docs/config.md, written from the configuration itself: `python -m isostep.config_page > docs/config.md`."""

from __future__ import annotations

from .config import WHAT, Config, default_of, expected_of, keys


def reference() -> str:
    """Every key with its values, default and meaning, as Markdown."""
    lines = [
        "# Configuration",
        "",
        "<!-- Written by `python -m isostep.config_page`; a test compares. -->",
        "",
        "`isostep train RUN.toml` reads these keys; each is a flag too (`--section.key VALUE`), and flags win. A key",
        "without a default may be left out, or set to `none` by a flag. WHAT names the experiment: a run does not",
        "resume under another one; `--allow-changed-what` lets settings of optimizer, schedule and precision change.",
        "HOW may change at every resume and changes no update. RUN may change too, except `[quality]`, which is fixed.",
        "",
    ]
    kinds = dict.fromkeys((*WHAT, "data"), "WHAT") | {"layout": "HOW"}
    for section, field in Config.model_fields.items():
        about = " ".join((field.annotation.__doc__ or "").split())  # type: ignore[union-attr]
        lines += [f"## [{section}] ({kinds.get(section, 'RUN')})", "", about, "", "| key | value | default | meaning |"]
        lines.append("|---|---|---|---|")
        for key, info in keys():
            if key.startswith(f"{section}."):
                default = f"`{default_of(info)}`" if default_of(info) else ""
                lines.append(f"| `{key.partition('.')[2]}` | {expected_of(info)} | {default} | {info.description} |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    print(reference(), end="")
