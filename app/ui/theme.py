"""How the dashboard looks, and the Streamlit settings that it always runs with.

Two themes share one set of figure colours: one blue, whose strength carries the amount, and one grey for what it is
compared with. The colour scales start transparent, so the page itself is their zero, in light and in dark. Lightness
alone orders them, so they read the same with any kind of colour vision.
"""

from __future__ import annotations

_LIGHT = {
    "primaryColor": "#1b65b8",
    "backgroundColor": "#ffffff",
    "secondaryBackgroundColor": "#f4f6f8",
    "textColor": "#1c2128",
    "borderColor": "#e1e5ea",
    "linkColor": "#1b65b8",
}
_DARK = {
    "primaryColor": "#5b9ff0",
    "backgroundColor": "#101418",
    "secondaryBackgroundColor": "#1a2027",
    "textColor": "#e4e8ed",
    "borderColor": "#2c343d",
    "linkColor": "#6eaaf2",
}
_BOTH = {
    "baseFontSize": 15,
    "baseRadius": "small",
    "linkUnderline": False,
}

# Given to the server when it starts, so that they hold in whatever folder that is.
SETTINGS: dict[str, object] = {
    "browser.gatherUsageStats": False,
    "client.showErrorLinks": False,
    "client.showSidebarNavigation": False,
    "client.toolbarMode": "minimal",
    "global.maxCachedMessageAge": 30,  # runs; with 2, many quick clicks ended in an error for good
    "logger.enableRich": False,
    "logger.hideWelcomeMessage": True,
    "logger.level": "warning",
    "server.fileWatcherType": "none",
    "server.headless": True,
    **{f"theme.{name}": value for name, value in _BOTH.items()},
    **{f"theme.light.{name}": value for name, value in _LIGHT.items()},
    **{f"theme.dark.{name}": value for name, value in _DARK.items()},
}

ABOUT = "The TwELL workbench: which neurons of a sparse language model fire, and what that is worth."

# What Streamlit's own elements leave open. `light-dark` follows the theme that the page is in, also when it changes.
CSS = """<style>
.stApp { --tw-link: light-dark(#1b65b8, #6eaaf2); }
/* the frame: pages and run chooser in one bar, the menu at its right */
.stApp .stMainBlockContainer { max-width: 1480px; margin-left: 0; padding: .8rem 1.5rem 3rem; }
[data-testid="stHeader"] { position: absolute; top: .1rem; right: 0; left: auto; width: auto; background: transparent; }
[data-testid="stHeader"], [data-testid="stHeader"] div { pointer-events: none; }
[data-testid="stHeader"] :is(button, button *, a) { pointer-events: auto; }
[data-testid="stStatusWidget"] { display: none; } /* its Stop would lie on the run chooser; pages have their own */
[data-testid="stPageLink"] a { padding-left: 0; }
.stElementContainer:not(.st-key-nav *) > [data-testid="stPageLink"] a p { color: var(--tw-link); font-weight: 600; }
/* the bar stays in sight; what a key or a link goes to stops below it */
.stMain { scroll-padding-top: 5.5rem; }
[data-testid="stLayoutWrapper"]:has(> .st-key-bar) { position: sticky; top: 0; z-index: 90;
  width: calc(100% + 3rem) !important; max-width: none; margin: -.8rem -1.5rem 0; padding: .35rem 1.5rem;
  /* its ground and its line go on to both edges of a window that is wider than the page; they widen nothing */
  border-image: linear-gradient(light-dark(#ffffff, #101418) calc(100% - 1px), light-dark(#e1e5ea, #2c343d) 0)
    fill 0 / 0 / 0 100vw; }
.st-key-bar { padding-right: 2.4rem; row-gap: .35rem !important; }
.st-key-bar .st-key-search-now, .st-key-bar [data-testid="InputInstructions"] { display: none; }
.st-key-bar input { text-overflow: ellipsis; }
.st-key-nav, .st-key-nav .stHorizontalBlock { flex-wrap: nowrap !important; gap: 0 !important; }
.tw-group { font-size: .75rem; line-height: 1.1; padding: 0 .55rem; opacity: .72; white-space: nowrap; }
.st-key-nav .stHtml { margin: 0; }
.st-key-nav [class*="st-key-group-"] { border-left: 1px solid rgba(139,149,161,.35); padding: 0 .4rem; }
.st-key-nav .st-key-group-0 { border-left: none; padding-left: 0; }
/* its links reach below it, and what reaches out of a box that scrolls sideways scrolls it down too */
.stApp .st-key-nav { overflow-x: auto; scrollbar-width: none; padding-bottom: 6px; margin-bottom: -6px; }
/* its links are all in sight, and the fields beside them give way; where it is narrower, the fields stand below */
@media (min-width: 1251px) {
  .stApp .st-key-bar > :has(> .st-key-nav) { flex: 1 0 max-content !important; }
  .st-key-bar > :is(.stElementContainer, :has(> .stForm)) { flex: 99 1 8rem !important; max-width: 280px; }
}
@media (max-width: 1250px) {
  .stApp :is([data-testid="stLayoutWrapper"], .stElementContainer):has(> .st-key-nav) { flex-basis: 100% !important; }
  .stApp .st-key-nav [data-testid="stPageLink"] a { padding: .2rem .4rem; }
  /* more links lie to the right, or to the left once scrolled: the last ones in sight fade */
  .stApp .st-key-nav { padding-inline: 1.5rem; margin-left: -1.5rem; width: calc(100% + 1.5rem); max-width: none;
    mask-image: linear-gradient(to right, transparent, #000 1.5rem calc(100% - 1.5rem), transparent); }
  .st-key-bar { padding-right: 2rem; }
  .tw-group { padding: 0 .4rem; letter-spacing: -.01em; }
  .st-key-bar > :is(.stElementContainer, :has(> .stForm)) { flex: 1 1 8rem !important; min-width: 0; }
}
@media (min-width: 641px) and (max-width: 799px) { /* as on a tablet, or on a laptop at 200 %: all links in sight */
  .stApp .st-key-nav [data-testid="stPageLink"] a { padding-inline: .2rem; }
  .st-key-nav [class*="st-key-group-"] { padding: 0 .22rem; }
  .tw-group { padding: 0 .2rem; }
}
.st-key-nav [data-testid="stPageLink"] a { padding: .2rem .55rem; min-height: 0; }
.st-key-nav [data-testid="stPageLink"] a p { white-space: nowrap; }
/* groups are as wide as their links, also where the bar is narrower */
.st-key-nav :is([class*="st-key-group-"], .stElementContainer, .stHorizontalBlock, [data-testid="stLayoutWrapper"]) {
  flex-shrink: 0 !important; max-width: none !important; }
/* where the keyboard is: around a link, inside of it in the bar, which cuts off what is beyond its edge */
.stApp :is(a, summary):focus-visible { outline: 2px solid var(--tw-link); outline-offset: 1px; }
.stApp .st-key-nav a:focus-visible { outline-offset: -2px; }
.st-key-tour { background: rgba(47,126,216,.1); border-radius: 6px; padding: .35rem .9rem; }
.st-key-tour .stElementContainer:has(.tw-said) { margin-top: 0; }
@media (min-width: 901px) { .stApp .st-key-tour { flex-wrap: nowrap; } } /* its buttons stay beside the words */
.stHorizontalBlock { row-gap: .6rem; }
/* a choice is as tall as the fields beside it, with its label in line with theirs */
[data-testid="stButtonGroup"] button { min-height: 2.5rem; }
[data-testid="stButtonGroup"] > [data-testid="stWidgetLabel"] { height: 1.5rem; }
@media (max-width: 900px) {
  .stHorizontalBlock:not(:has(> .stColumn), .st-key-nav) { column-gap: 1rem; }
  [class*="st-key-pair"] [data-testid="stColumn"] { min-width: 100%; }
  .st-key-cards [data-testid="stColumn"] { min-width: calc(50% - 2rem); }
  .stHtml .tw-numbers:has(> :nth-child(4):last-child) { grid-template-columns: repeat(4, 1fr); column-gap: 1.2rem; }
  .stPlotlyChart .heatmap-label text { font-size: 9px !important; }
}

/* words */
h1.tw-title { font-size: 1.6rem; font-weight: 600; margin: 0; padding: .2rem 0; }
.tw-note { font-size: .87rem; opacity: .72; margin: .1rem 0 0; line-height: 1.4; }
.tw-said { margin: 0; padding: .12rem 0; line-height: 1.45; }
.stElementContainer:has(.tw-said) { margin-top: -.8rem; }
.tw-head { display: flex; flex-wrap: wrap; gap: .25rem .9rem; align-items: baseline; font-size: .87rem; }
.tw-head span { opacity: .72; }
.tw-mark { border: 1px solid currentColor; border-radius: 999px; padding: 0 .55rem; margin-right: .3rem;
  font-size: .8rem; }
.tw-mark.live::before { content: "●"; color: #2f7ed8; margin-right: .35rem; }
.tw-token { font-family: "Source Code Pro", monospace; background: rgba(47,126,216,.14); border-radius: 4px;
  padding: .05em .35em; unicode-bidi: isolate; white-space: pre-wrap; overflow-wrap: anywhere; }
.tw-said .tw-token { font-size: .92em; }
.tw-said a { color: inherit !important; text-decoration: none !important; }
.tw-said a.plain { color: var(--tw-link) !important; }
.tw-said a.plain:is(:hover, :focus-visible) { text-decoration: underline !important; }
.tw-said a:is(:hover, :focus-visible) .tw-token { background: rgba(47,126,216,.32); }
.st-key-cards .tw-said { font-size: .95rem; }
.stHtml .tw-facts { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1.2rem; margin: 0; padding: 0;
  font-size: .9rem; }
.tw-facts dt { opacity: .72; }
.tw-facts dd { margin: 0; overflow-wrap: anywhere; }
.tw-empty { max-width: 46rem; padding: 1.5rem 0; }
.tw-empty .tw-option { white-space: nowrap; }
.tw-empty pre { padding: .6rem .9rem; border-radius: 4px; white-space: pre-wrap; overflow-wrap: anywhere;
  background: rgba(139,149,161,.14); }

/* numbers in a row */
.stHtml .tw-numbers { display: grid; grid-template-columns: repeat(auto-fit, minmax(11.5rem, 1fr)); gap: .9rem 1.8rem;
  margin: 0; padding: .3rem 0; }
.tw-numbers dt { font-size: .85rem; opacity: .72; }
.tw-numbers dd { margin: 0; }
.tw-numbers b { display: block; font-size: 1.65rem; font-weight: 500; line-height: 1.25; letter-spacing: -.01em; }
.tw-numbers details { font-size: .8rem; line-height: 1.35; }
.tw-numbers details > :not(summary) { opacity: .8; }
.tw-numbers summary { cursor: pointer; color: var(--tw-link); width: max-content; }
a.tw-mini { display: block; color: inherit !important; text-decoration: none !important; margin: -.4rem 0 .2rem; }
.tw-mini span { font-size: .8rem; opacity: .72; }
.tw-mini b { display: flex; align-items: flex-end; gap: 2px; height: 3.2rem;
  border-bottom: 1px solid rgba(139,149,161,.4); }
.tw-mini i { flex: 1; min-height: 1px; background: #2f7ed8; opacity: .7;
  border-radius: 2px 2px 0 0; }
a.tw-mini:is(:hover, :focus-visible) i { opacity: 1; }
.tw-lead { max-width: 62rem; margin: 0; line-height: 1.5; }
.tw-lead a { color: var(--tw-link); }
.tw-note a { color: inherit; }  /* a note is pale: a link's colour would be too pale in it */
.tw-numbers dd span { display: block; font-size: .83rem; line-height: 1.35; opacity: .72; }

/* figures */
.tw-figure { margin: .4rem 0 0; }
.tw-figure h2 { font-size: 1.05rem; font-weight: 600; margin: 0; padding: 0; line-height: 1.35; }
.stPlotlyChart { margin-top: -.6rem; }
.stElementContainer:has(> .stEmpty) { display: none; }
.tw-picture { position: relative; font-size: .875rem; padding: .55rem 0; }
.tw-picture summary { cursor: pointer; list-style: none; display: flex; align-items: center; gap: .5rem;
  white-space: nowrap; justify-content: flex-end; }
.tw-picture summary::-webkit-details-marker { display: none; }
.tw-picture summary::after { content: ""; width: .38rem; height: .38rem; margin-top: -.2rem; transform: rotate(45deg);
  border: solid currentColor; border-width: 0 1.5px 1.5px 0; }
.tw-picture summary:hover { color: var(--tw-link); }
.tw-picture > div { position: absolute; right: 0; top: 100%; z-index: 80; display: grid; width: 15rem; padding: .5rem;
  border: 1px solid rgba(139,149,161,.45); border-radius: 6px; background: light-dark(#ffffff, #1a2027);
  box-shadow: 0 4px 12px rgba(0,0,0,.16); }
.stApp .stHorizontalBlock:has(> * .tw-picture[open]) { overflow: visible; }
.stApp :has(> .tw-picture), .stApp .stElementContainer:has(.tw-picture) { overflow: visible; flex-shrink: 0; }
.stApp [data-testid="stLayoutWrapper"]:has(.tw-picture[open]) { position: relative; z-index: 80; }
.tw-picture button { font: inherit; color: inherit; background: none; border: 1px solid rgba(139,149,161,.45);
  border-radius: 4px; padding: .25rem .6rem; margin: .15rem 0; cursor: pointer; text-align: left; }
.tw-picture button:is(:hover, :focus-visible) { border-color: #2f7ed8; }
.tw-picture output { display: block; opacity: .8; }
.stPlotlyChart :is([class*="tick"], .cbaxis, .cbtitle) text, .stPlotlyChart [class*="title"] {
  fill: light-dark(#56606c, #aeb7c2) !important; }
.stPlotlyChart :is(.textpoint text, .annotation-text, .legendtext) { fill: light-dark(#56606c, #aeb7c2) !important; }
.stPlotlyChart :is(.heatmap-label text, .bartext, .hovertext text) { fill: light-dark(#16202b, #eef2f6) !important; }
.stPlotlyChart .hovertext path { fill: light-dark(#ffffff, #1a2027) !important;
  stroke: light-dark(#c3cad2, #46515d) !important; }

/* the places where a token stands: a grid with the token in its middle */
.tw-places { font-family: "Source Code Pro", monospace; font-size: .83rem; line-height: 1.5; }
.tw-place { display: grid; grid-template-columns: 6.6rem minmax(0,1fr) auto minmax(0,1fr) 4.2rem 3.6rem 3.6rem;
  gap: .45rem; padding: .2rem 0; border-bottom: 1px solid rgba(139,149,161,.22); align-items: baseline; }
.tw-place > * { white-space: pre; overflow: hidden; unicode-bidi: isolate; }
.tw-place .where, .tw-place .number { opacity: .72; font-variant-numeric: tabular-nums; }
.tw-place .number { text-align: right; }
.tw-place .before { display: flex; justify-content: flex-end; }
.tw-place .before span { unicode-bidi: isolate; }
.tw-place .token { border-radius: 3px; padding: 0 .25rem; max-width: 16rem; text-overflow: ellipsis; }
.tw-places .token.out { text-decoration: underline dotted; text-underline-offset: .3em; }
.tw-place.names > * { font-family: "Source Sans", sans-serif; opacity: .72; overflow: visible; }
/* text that is cut fades out instead of ending inside a letter */
.tw-places .before { mask-image: linear-gradient(to right, transparent, #000 1.5rem); }
.tw-places .after { mask-image: linear-gradient(to left, transparent, #000 1.5rem); }
@media (max-width: 900px) {
  .tw-place { grid-template-columns: 4.6rem minmax(0,1fr) auto minmax(0,1fr) 3.2rem 3rem; }
  .tw-place .loss { display: none; }
}

/* phones: what stands side by side keeps its width and scrolls, or stands one below the other */
@media (max-width: 640px) {
  /* the field's hint is read whole: it has no lens, and the row goes on under the menu */
  .st-key-search [data-testid="stTextInputRootElement"] > :has(> [data-testid="stTextInputIcon"]) { display: none; }
  .st-key-search input::placeholder { font-size: .87rem; }
  .stApp .st-key-bar > :has(> .stForm) { flex-basis: 10.6rem !important; }
  .stApp .st-key-bar > .st-key-chooser { flex-basis: 6.4rem !important; margin-right: -2rem; }
  /* more of a figure lies to the right: what is in sight fades, and only the margin after its end fades there */
  [class*="st-key-wide-"] { overflow-x: auto; mask-image: linear-gradient(to left, transparent, #000 2.4rem); }
  [class*="st-key-wide-"] > .stElementContainer { min-width: 48.4rem; padding-right: 2.4rem; }
  .stHorizontalBlock:has(> .stElementContainer .tw-figure) { flex-wrap: wrap; row-gap: 0; }
  .stHorizontalBlock > .stElementContainer:has(.tw-figure) { flex-basis: 100%; }
  .tw-picture > div { right: auto; left: -7rem; }
  .stHtml .tw-numbers, .stHtml .tw-numbers:has(> :nth-child(4):last-child) { grid-template-columns: 1fr 1fr; }
  .st-key-cards [data-testid="stColumn"] { min-width: 100%; }
  [data-testid="stButtonGroup"] > div { flex-wrap: wrap; }
}
</style>"""
