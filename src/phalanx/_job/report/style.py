"""This module is the page's style: system fonts, light and dark, one column on a phone, black on white in print."""

# Colours of Okabe and Ito (2008), distinct for colour-blind readers; darker or lighter where the background needs it.
CSS = """
:root{color-scheme:light dark;--paper:#fff;--card:#f6f7f9;--ink:#1b2430;--faint:#5f6b7a;--rule:#dfe3e8;
--data:#e69f00;--forward:#56b4e9;--backward:#0072b2;--update:#009e73;--waiting:#d55e00;--communication:#cc79a7;
--other:#b3bac4;--on-light:#1b2430;--on-dark:#fff;--bad:#b3261e;--warn:#a05a00;--note:#41628f;--good:#0b6b4f;
--c0:#0072b2;--c1:#0072b2;--c2:#d55e00;--c3:#009e73;--c4:#a8528a;--c5:#b35900;--c6:#5b6bb5;--c7:#7a6a00;--c8:#3d8fb8}
@media(prefers-color-scheme:dark){:root{--paper:#12161c;--card:#1a2029;--ink:#e6eaf0;--faint:#9aa7b6;--rule:#2b3440;
--other:#55606e;--backward:#2f8fd0;--waiting:#e8702a;--bad:#ff8a80;--warn:#f2b155;--note:#9dbcf0;--good:#5fd3a8;
--c0:#56b4e9;--c1:#56b4e9;--c2:#ee8a4a;--c3:#35c29a;--c4:#dd92bd;--c5:#f0a34a;--c6:#97a4ea;--c7:#d4c24a;--c8:#8fd0ef}}
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{margin:0;background:var(--paper);color:var(--ink);font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,
"Noto Sans","DejaVu Sans",sans-serif;font-variant-numeric:tabular-nums}
main{max-width:1060px;margin:0 auto;padding:28px 24px 64px}
h1{font-size:28px;line-height:1.2;margin:0 0 4px;overflow-wrap:anywhere;letter-spacing:-.01em}
h2{font-size:19px;margin:44px 0 12px;letter-spacing:-.005em}
h3{font-size:15px;margin:0 0 6px}
p{margin:6px 0;max-width:75ch}
a{color:inherit}
code{font:.92em ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;overflow-wrap:anywhere}
.faint{color:var(--faint)}
.small{font-size:14px}
.state{display:inline-block;font-weight:600;border-radius:99px;padding:2px 12px;font-size:14px;border:1.5px solid;
margin:10px 8px 0 0}
.bad{color:var(--bad)}.warn{color:var(--warn)}.note{color:var(--note)}.good{color:var(--good)}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:12px;margin:22px 0 0;padding:0}
.tile{background:var(--card);border-radius:10px;padding:12px 16px;margin:0}
.tile dt{color:var(--faint);font-size:14px}
.tile dd{margin:0;font-size:23px;font-weight:600;line-height:1.3;white-space:nowrap}
.findings{list-style:none;margin:0;padding:0}
.findings li{padding:10px 0 10px 16px;border-left:4px solid;margin:0 0 8px;background:var(--card);
border-radius:0 10px 10px 0;padding-right:14px}
.findings span{color:var(--ink)}
.grid{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,420px),1fr));gap:24px 32px}
figure{margin:0;min-width:0;max-width:500px}
.pair{display:grid;grid-template-columns:minmax(0,400px) minmax(0,1fr);gap:16px 28px;align-items:start}
@media(max-width:900px){.pair{grid-template-columns:minmax(0,1fr)}}
figcaption{font-size:14px;color:var(--faint);margin:2px 0 0}
svg{display:block;width:100%;height:auto;font-family:inherit;font-variant-numeric:tabular-nums}
.legend{display:flex;flex-wrap:wrap;gap:4px 18px;font-size:14px;margin:0 0 12px;padding:0;list-style:none}
.legend i{display:inline-block;width:12px;height:12px;border-radius:3px;margin-right:6px;vertical-align:-1px}
.bars{display:grid;grid-template-columns:auto 1fr auto;gap:6px 12px;align-items:center;font-size:14px}
.bar{display:flex;height:26px;border-radius:5px;overflow:hidden;background:var(--card)}
.bar i{display:block;font-style:normal;overflow:hidden;white-space:nowrap;text-align:center;line-height:26px;
font-size:13px;color:var(--on-light);min-width:0;container-type:inline-size}
.bar i.on-dark{color:var(--on-dark)}
.bar b{font-weight:500}
@container(max-width:38px){.bar b{display:none}}
.wide{overflow-x:auto;margin:0 -4px;padding:0 4px}
table{border-collapse:collapse;font-size:14px}
th,td{text-align:right;padding:5px 0 5px 16px;border-bottom:1px solid var(--rule);white-space:nowrap;vertical-align:top}
th{font-weight:500;color:var(--faint)}
th:first-child,td:first-child{text-align:left;padding-left:0}
td.text,th.text{text-align:left;white-space:normal}
.lanes{display:grid;grid-template-columns:auto 1fr;gap:4px 12px;align-items:center;font-size:14px}
.lane{position:relative;height:22px;background:var(--card);border-radius:4px}
.lane i{position:absolute;top:3px;bottom:3px;border-radius:3px;background:var(--c0);min-width:2px}
.lane i.start{background:var(--other)}
.lane u{position:absolute;top:-2px;bottom:-2px;width:3px;margin-left:-1px;background:var(--bad);border-radius:2px}
.scale{position:relative;height:20px;color:var(--faint);font-size:13px}
.scale span{position:absolute;transform:translateX(-50%);white-space:nowrap}
.scale span:first-child{transform:none}.scale span:last-child{transform:translateX(-100%)}
details{margin:10px 0}
summary{cursor:pointer;color:var(--faint);font-size:14px}
pre{background:var(--card);border-radius:8px;padding:12px;overflow-x:auto;font-size:13px;line-height:1.4}
footer{margin-top:56px;color:var(--faint);font-size:14px;border-top:1px solid var(--rule);padding-top:12px}
@media(max-width:600px){svg text{font-size:15px}main{padding:20px 16px 48px}h1{font-size:23px}.tile dd{font-size:20px}
.tiles{grid-template-columns:repeat(2,1fr)}th,td{padding-left:12px}}
@media print{:root{color-scheme:light;--paper:#fff;--card:#f2f3f5;--ink:#000;--faint:#444;--rule:#ccc;--other:#b3bac4;
--backward:#0072b2;--waiting:#d55e00;--bad:#b3261e;--warn:#a05a00;--note:#41628f;--good:#0b6b4f;
--c0:#0072b2;--c1:#0072b2;--c2:#d55e00;--c3:#009e73;--c4:#a8528a;--c5:#b35900;--c6:#5b6bb5;--c7:#7a6a00;--c8:#3d8fb8}
body{font-size:11pt;-webkit-print-color-adjust:exact;print-color-adjust:exact}main{max-width:none;padding:0}.wide{overflow:visible;margin:0;padding:0}
th,td{padding-left:10px;white-space:normal}
figure,.tile,.findings li,tr,.bars{break-inside:avoid}h2{break-after:avoid}details:not([open])>*{display:none}}
"""
