"""The report's CSS: light and dark colours, one column on a phone, three on a wide screen."""

STYLE = """
:root { color-scheme: light dark; --page: #ffffff; --card: #f6f7f8; --ink: #1c1e21; --muted: #62666d; --grid: #dfe1e5;
  --first: #2a6fc9; --second: #d5762a; --third: #b7bcc4; --fourth: #3f9c7a; --bad: #b3261e; --shade: #0003; }
@media (prefers-color-scheme: dark) { :root { --page: #16181b; --card: #1f2226; --ink: #eceef0; --muted: #a3a8b0; --grid: #363a40;
  --first: #6aa5f0; --second: #e69a58; --third: #5d636c; --fourth: #62c4a0; --bad: #ff8a80; --shade: #000a; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem clamp(.8rem, 3vw, 2.5rem) 4rem; max-width: 84rem;
  background: var(--page); color: var(--ink); overflow-wrap: anywhere;
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0; }
h2 { font-size: 1.15rem; margin: 2.5rem 0 .8rem; }
h3 { font-size: .95rem; margin: 1.4rem 0 .4rem; }
h4 { font-size: .95rem; margin: 0 0 .4rem; }
figure h3, .card h3 { margin-top: 0; }
p { margin: .3rem 0; }
.note, figcaption, th, dt, .tile > span { color: var(--muted); }
.note { max-width: 70ch; }
header dl { margin-top: .8rem; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(8.5rem, 1fr)); gap: .6rem; margin-top: 1.2rem; }
.tile, figure, .card { background: var(--card); border-radius: 8px; padding: .8rem .9rem; margin: 0; min-width: 0; }
.tile b { display: block; font-size: 1.3rem; line-height: 1.3; }
.tile small { font-size: .85rem; font-weight: 400; color: var(--muted); }
.tile > span { font-size: .85rem; }
.tiles + *, .grid + .grid, .stack + .grid, .grid + .stack, .grid + p { margin-top: .8rem; }
.grid { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 21rem), 1fr)); gap: .8rem; }
.texts { columns: 21rem; column-gap: .8rem; margin-top: .8rem; }
.texts .card { break-inside: avoid; margin-bottom: .8rem; }
.images { display: flex; flex-wrap: wrap; gap: .4rem; align-items: end; margin: .4rem 0; }
.images img { max-width: 100%; height: auto; border-radius: 4px; }
code { font: .86em ui-monospace, Menlo, Consolas, monospace; }
figure svg { display: block; width: 100%; max-width: 23rem; height: auto; margin: 0 auto; }
figcaption { font-size: .85rem; }
.key { display: inline-block; margin-right: .7em; }
.key i { display: inline-block; width: .75em; height: .75em; border-radius: 2px; margin-right: .35em; }
table { border-collapse: collapse; width: 100%; font-size: .88rem; font-variant-numeric: tabular-nums; }
th { font-weight: 500; }
th, td { text-align: right; padding: .25rem .35rem; border-bottom: 1px solid var(--grid); vertical-align: top; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
td, th { overflow-wrap: normal; }
.reasons th:last-child, .reasons td:last-child { text-align: left; overflow-wrap: anywhere; width: 70%; padding-left: .8rem; }
.names td:nth-child(2), .names th:nth-child(2) { text-align: left; }
.stack { display: grid; gap: .8rem; }
td:first-child { overflow-wrap: anywhere; }
tr:last-child td { border-bottom: 0; }
dl { display: grid; grid-template-columns: minmax(7rem, max-content) minmax(0, 1fr); gap: .15rem 1rem;
  margin: 0; font-size: .88rem; }
dd { margin: 0; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: .2rem 0 .7rem;
  font: .84rem/1.45 ui-monospace, Menlo, Consolas, monospace; max-height: 15rem; overflow-y: auto;
  scrollbar-width: thin; scrollbar-color: var(--muted) transparent;
  background: linear-gradient(var(--card) 1rem, transparent) top / 100% 2rem no-repeat local,
    linear-gradient(transparent, var(--card) 1rem) bottom / 100% 2rem no-repeat local,
    linear-gradient(var(--shade), transparent) top / 100% .6rem no-repeat scroll,
    linear-gradient(transparent, var(--shade)) bottom / 100% .6rem no-repeat scroll; }
@media (max-width: 24rem) { table { font-size: .8rem; } th, td { padding: .25rem .2rem; } }
.error { color: var(--bad); }
"""
