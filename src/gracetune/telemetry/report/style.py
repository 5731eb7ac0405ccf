"""The style sheet of the report: for light and dark mode, phones and print. It loads nothing from elsewhere."""

from __future__ import annotations

from gracetune.telemetry.report.plots import TEXT_SIZE, WIDTH

_LIGHT = ("#0b62a4", "#b3450a", "#177245", "#8a3ffc", "#9f1853", "#5f6b00")
_DARK = ("#78b6f0", "#ff9d5c", "#6fd39b", "#c4a2ff", "#ff8ab5", "#d3db6b")
_DASHES = ("none", "7 3", "2 3", "9 3 2 3", "4 2", "1 3")
"""Curves differ in their dashes too, for readers who cannot tell the colours apart."""


def _colours(values: tuple[str, ...]) -> str:
    return " ".join(f"--c{number}: {value};" for number, value in enumerate(values))


def _curves() -> str:
    return "\n".join(
        f".c{number} {{ --c: var(--c{number}); }} path.line.c{number} {{ stroke-dasharray: {dash}; }}"
        for number, dash in enumerate(_DASHES)
    )


STYLE = f"""
:root {{
  color-scheme: light dark;
  --page: #ffffff; --card: #f5f6f8; --ink: #1b1f24; --soft: #57606a; --rule: #d5d9de; --link: #0b57d0;
  {_colours(_LIGHT)}
}}
@media (prefers-color-scheme: dark) {{
  :root {{
    --page: #14171a; --card: #1e2226; --ink: #e8eaed; --soft: #a8b0b8; --rule: #3a4047; --link: #8ab4f8;
    {_colours(_DARK)}
  }}
}}
* {{ box-sizing: border-box; }}
body {{ margin: 0; background: var(--page); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }}
header, main, footer {{ max-width: 60rem; margin: 0 auto; padding: 0 1rem; }}
header {{ padding-top: 2rem; }}
h1 {{ font-size: 1.7rem; margin: 0; overflow-wrap: anywhere; }}
h2 {{ font-size: 1.2rem; margin: 2.5rem 0 .75rem; padding-top: .75rem; border-top: 1px solid var(--rule); }}
h3 {{ font-size: 1rem; margin: 1.25rem 0 .4rem; overflow-wrap: anywhere; }}
a {{ color: var(--link); }}
.skip {{ position: absolute; left: -99rem; }}
.skip:focus {{ left: 1rem; }}
.note, footer, caption {{ color: var(--soft); font-size: .9rem; }}
.outcome {{ font-weight: 600; }}
.tiles {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(9.5rem, 1fr)); gap: .6rem; margin: 1.2rem 0; }}
.tiles div {{ background: var(--card); border-radius: .5rem; padding: .6rem .8rem; }}
.tiles dt {{ color: var(--soft); font-size: .85rem; }}
.tiles dd {{ margin: 0; font-size: 1.15rem; font-weight: 600; font-variant-numeric: tabular-nums; }}
.plots {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, {WIDTH}px), 1fr)); gap: 1.75rem; }}
figure {{ margin: 0 0 1.75rem; min-width: 0; }}
figure.plot {{ max-width: {1.25 * WIDTH:.0f}px; margin: 0; }}
figcaption {{ font-weight: 600; }}
svg {{ width: 100%; height: auto; display: block; overflow: visible; }}
svg text {{ fill: var(--soft); font-size: {TEXT_SIZE}px; }}
.end {{ text-anchor: end; }}
.middle {{ text-anchor: middle; }}
.grid {{ stroke: var(--rule); }}
.marker {{ stroke: var(--soft); stroke-dasharray: 2 4; }}
path.line {{ fill: none; stroke: var(--c); stroke-width: 1.75; stroke-linejoin: round; }}
path.line.faint {{ stroke-width: 1; opacity: .4; stroke-dasharray: none; }}
path.area {{ fill: var(--c); opacity: .75; stroke: var(--page); stroke-width: .5; }}
circle {{ fill: var(--c); }}
{_curves()}
.key {{ list-style: none; display: flex; flex-wrap: wrap; gap: .2rem 1rem; margin: .2rem 0; padding: 0;
  font-size: .9rem; }}
.key li::before {{ content: ""; display: inline-block; width: .8em; height: .8em; margin-right: .4em;
  border-radius: .15em; background: var(--c); }}
.scroll {{ overflow: auto; max-height: 28rem; }}
table {{ border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }}
.scroll {{ margin-top: .75rem; }}
caption {{ text-align: left; }}
th, td {{ text-align: left; padding: .25rem .8rem .25rem 0; border-bottom: 1px solid var(--rule); vertical-align: top;
  overflow-wrap: break-word; }}
th {{ white-space: nowrap; }}
td:last-child {{ min-width: 9rem; }}
.bars td.end {{ text-align: right; }}
.bars td.share {{ width: 22rem; }}
.bar {{ display: block; height: 1.1em; min-width: 1px; border-radius: .15em; background: var(--c0); }}
.samples {{ display: flex; gap: .6rem; overflow-x: auto; padding: 0 0 .5rem; margin: 0; list-style: none; }}
.samples li {{ flex: none; max-width: 12rem; font-size: .85rem; color: var(--soft); }}
.samples img {{ display: block; min-width: 8rem; border-radius: .3rem; }}
pre {{ background: var(--card); padding: .8rem; border-radius: .5rem; overflow-x: auto; font-size: .85rem;
  white-space: pre-wrap; overflow-wrap: anywhere; }}
@media print {{ .scroll {{ max-height: none; }} }}
""".strip()
