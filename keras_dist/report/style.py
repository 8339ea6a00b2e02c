"""The style sheet of a page: light and dark, wide and narrow."""

STYLE = """
:root {
  --paper: #ffffff; --card: #f6f7f9; --ink: #1b1f24; --dim: #57606a;
  --line: #8c959f; --grid: #e1e4e8; --note: #fff4d6;
  --c1: #2f6fbb; --c2: #d9730d; --c3: #b83280; --c4: #1f8a5b;
  --c5: #7a52cc; --c6: #a67c00; --c7: #0f8b9d; --c8: #6b7280;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #14171c; --card: #1d2128; --ink: #e6e9ee; --dim: #9aa4b2;
    --line: #6b7683; --grid: #2c323b; --note: #3a3117;
    --c1: #6aa9f4; --c2: #f2a04e; --c3: #ea7fbc; --c4: #53c592;
    --c5: #b197f7; --c6: #dbb53f; --c7: #4cc5d6; --c8: #a3abb8;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; max-width: 72rem; padding: 1rem; background: var(--paper);
  color: var(--ink); font: 16px/1.5 system-ui, sans-serif;
}
h1 { margin: 0; font-size: 1.6rem; line-height: 1.25; overflow-wrap: anywhere; }
h2 { margin: 2rem 0 .5rem; font-size: 1.2rem; }
header p, small { color: var(--dim); }
header p { margin: .25rem 0 1rem; overflow-wrap: anywhere; }
small { display: block; font-size: .82rem; font-weight: normal; }
.tiles {
  display: grid; gap: .6rem;
  grid-template-columns: repeat(auto-fill, minmax(10.2rem, 1fr));
}
.tiles div { background: var(--card); border-radius: .5rem; padding: .6rem .8rem; }
.tiles b { display: block; font-size: 1.2rem; overflow-wrap: anywhere; }
.tiles span { color: var(--dim); font-size: .85rem; }
.charts {
  display: grid; gap: 1rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr));
}
figure {
  margin: 0; min-width: 0; padding: .8rem; background: var(--card);
  border-radius: .5rem;
}
figure:last-child:nth-child(odd) { grid-column: 1 / -1; }
figcaption { font-weight: 600; margin-bottom: .4rem; }
figure > div { width: 100%; min-height: 14rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .88rem; margin: .6rem 0; }
th, td {
  text-align: right; padding: .25rem .7rem; white-space: nowrap;
  border-bottom: 1px solid var(--grid); font-variant-numeric: tabular-nums;
}
th { color: var(--dim); font-weight: 600; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
.remarks th:last-child, .remarks td:last-child { text-align: left; }
.remarks td { vertical-align: top; }
.remarks td:last-child:not(:empty) {
  min-width: 16rem; white-space: normal; overflow-wrap: anywhere;
}
summary { cursor: pointer; margin-top: .8rem; }
ul { padding-left: 1.2rem; }
p, li { overflow-wrap: anywhere; }
pre { overflow-x: auto; background: var(--card); padding: .8rem; font-size: .8rem; }
@media (max-width: 40rem) { pre { white-space: pre-wrap; overflow-wrap: anywhere; } }
#vg-tooltip-element {
  background: var(--card); color: var(--ink); border: 1px solid var(--line);
}
#vg-tooltip-element table tr td.key { color: var(--dim); }
#vg-tooltip-element td { border: none; padding: .1rem .4rem; white-space: normal; }
"""
