"""How the passage looks, and the other pieces that are HTML of our own (`theme.CSS` has what Streamlit leaves open)."""

from __future__ import annotations

CSS = """<style>
/* the passage, and beside it what is known of the token under the pointer */
.tw-text { position: relative; padding-right: 22rem; min-height: var(--pane); }
.tw-passage { font-family: "Source Code Pro", monospace; font-size: .88rem; line-height: 1.75; white-space: pre-wrap;
  overflow-wrap: anywhere; max-height: 60vh; overflow-y: auto; padding: .2rem .3rem; outline-offset: 2px; }
.tw-passage a.t { color: inherit !important; text-decoration: none !important; border-radius: 3px; padding: .12em 0; }
.tw-passage a.bare { padding: .12em .25em; }
.tw-passage a.out { text-decoration: underline dotted !important; text-underline-offset: .3em; }
.tw-passage a.made { font-style: italic; }
.tw-passage a.here { outline: 2px solid #c9821f; display: inline-block; line-height: 1.3;
  scroll-snap-align: center; }
/* the marked token comes into view: for a moment it is all that the text can stop at */
.tw-passage:has(.here) { max-height: 38vh; animation: tw-find .5s step-end; }
@keyframes tw-find { from, to { scroll-snap-type: y mandatory; } }
.tw-passage a.t:is(:hover, :focus-visible) { outline: 2px solid #2f7ed8; }
.tw-passage .end { opacity: .35; font-style: normal; }
.tw-text .tw-pane, .tw-passage a.t::after { position: absolute; top: 0; right: 0; width: 20.5rem; height: var(--pane);
  box-sizing: border-box; margin: 0; padding: .1rem 0 .1rem 1rem; border-left: 1px solid rgba(139,149,161,.35);
  font: .8rem/1.5 "Source Code Pro", monospace; white-space: pre; overflow: hidden; background: none; }
.tw-passage a.t::after { content: attr(data-tooltip); display: none; }
.tw-passage a.t:is(:hover, :focus-visible)::after { display: block; }
.tw-text:has(a.t:is(:hover, :focus-visible)) .tw-pane { visibility: hidden; }
.tw-scale { display: flex; align-items: center; gap: .6rem; font-size: .83rem; }
.tw-scale span { opacity: .8; }
.tw-scale .tw-quiet { opacity: .72; }
.tw-place a.where { color: var(--tw-link) !important; opacity: 1; text-decoration: none !important; }
.tw-scale i { width: 11rem; height: .7rem; border-radius: 3px; border: 1px solid rgba(139,149,161,.35);
  background: linear-gradient(to right, rgba(47,126,216,.02), rgba(47,126,216,.72)); }
@media (max-width: 900px) {
  /* the pane stands below, as tall as its text; under the pointer a token's own covers what comes after it */
  .tw-text { padding-right: 0; min-height: 0; }
  .tw-text .tw-pane { position: static; width: auto; height: auto; padding: .5rem 0 0 .3rem; border: 0; }
  .tw-text .tw-pane span { display: none; }
  .tw-passage a.t::after { top: calc(100% - 2rem); z-index: 5; left: 0; width: 100%; padding: .5rem 0 0 .3rem;
    border: 0; border-bottom: 1px solid rgba(139,149,161,.35); background: light-dark(#ffffff, #101418); }
  .tw-text:has(.here) .tw-passage a.t::after { top: calc(100% - var(--pane)); }
}

/* a table's own buttons stand in its last line: above it they would cover Data and Code */
[data-testid="stElementToolbar"] { top: auto !important; bottom: .3rem; right: .3rem !important; }

/* places that are links */
.tw-jump { display: grid; grid-template-columns: 6.6rem minmax(0,1fr) auto minmax(0,1fr) 4.6rem; gap: .45rem;
  padding: .2rem 0; border-bottom: 1px solid rgba(139,149,161,.22); align-items: baseline; color: inherit !important;
  text-decoration: none !important; }
a.tw-jump:is(:hover, :focus-visible) { background: rgba(47,126,216,.07); }
.tw-jump > * { white-space: pre; overflow: hidden; unicode-bidi: isolate; }
.tw-jump .where, .tw-jump .number { opacity: .72; font-variant-numeric: tabular-nums; }
a.tw-jump .where { color: var(--tw-link); opacity: 1; }
.tw-jump.names > * { font-family: "Source Sans", sans-serif; overflow: visible; }
.tw-jump .number { text-align: right; }
a.tw-jump .before { display: flex; justify-content: flex-end; }
a.tw-jump mark { background: rgba(47,126,216,.18); color: inherit; }
a.tw-jump .token { border-radius: 3px; padding: 0 .25rem; max-width: 16rem; text-overflow: ellipsis; }

.stElementContainer:not(.st-key-nav *) > [data-testid="stPageLink"] a { background: none; }

/* a neuron's examples */
.tw-again { font-size: .75rem; border: 1px solid rgba(139,149,161,.5); border-radius: 999px; padding: 0 .4rem;
  color: light-dark(#56606c, #aeb7c2); }
h3.tw-part { font-size: .9rem; font-weight: 600; margin: .2rem 0; padding: 0; }
.tw-example, .tw-example-names {
  display: grid; grid-template-columns: 6.6rem minmax(0,1fr) 5rem 4.2rem; gap: .45rem; padding: .25rem 0;
  border-bottom: 1px solid rgba(139,149,161,.22); align-items: baseline; }
.tw-example a.where { color: var(--tw-link) !important; text-decoration: none !important;
  font-variant-numeric: tabular-nums; }
.tw-example-names > * { font-family: "Source Sans", sans-serif; opacity: .72; }
.tw-example .words { white-space: pre-wrap; overflow-wrap: anywhere; }
.tw-example .words span { border-radius: 3px; padding: .1em 0; }
.tw-example .words .here { outline: 1px solid #c9821f; }
:is(.tw-example, .tw-example-names) .number { text-align: right; opacity: .72; }

/* passages by name */
.tw-titles { max-height: 50vh; width: 35rem; max-width: 80vw; overflow-y: auto; }
.tw-title-row { display: grid; grid-template-columns: 2.6rem minmax(0,1fr) 9rem; gap: .6rem; padding: .2rem .1rem;
  color: inherit !important; text-decoration: none !important; font-size: .87rem;
  border-bottom: 1px solid rgba(139,149,161,.22); }
.tw-title-row span { white-space: nowrap; overflow: hidden; text-overflow: ellipsis; unicode-bidi: isolate; }
.tw-title-row :is(:first-child, :last-child) { opacity: .72; }
a.tw-title-row:is(:hover, :focus-visible) { background: rgba(47,126,216,.07); }
.tw-found { max-height: 30vh; overflow-y: auto; }

/* tokens and words in order of the neurons that they fire, a link a row */
.tw-fired { display: grid; grid-template-columns: 10rem minmax(6rem,1fr) 9.6rem 3.6rem 4.4rem minmax(0,2.6fr);
  gap: .8rem; align-items: center; padding: .2rem 0; border-bottom: 1px solid rgba(139,149,161,.22); font-size: .87rem;
  color: inherit !important; text-decoration: none !important; font-variant-numeric: tabular-nums; }
.tw-fired.names { opacity: .72; }
.tw-fired > span:nth-of-type(n+2):not(:last-child) { text-align: right; }
.tw-fired > span { overflow: hidden; white-space: nowrap; text-overflow: ellipsis; }
.tw-fired .tw-token { white-space: pre; }
/* the axis is dots, without ends: a line with ends would look like an interval */
.tw-fired > i { position: relative; height: .6rem; background: center / 100% 1px no-repeat
  repeating-linear-gradient(to right, rgba(139,149,161,.5) 0 1px, transparent 1px 6px); }
.tw-fired-rows.bare .tw-fired { grid-template-columns: 10rem minmax(6rem,26rem) 9.6rem 3.6rem 4.4rem; }
.tw-fired-rows.bare .tw-fired > span:nth-of-type(n+2) { text-align: right; }
.tw-fired b { position: absolute; top: 50%; width: .55rem; height: .55rem; margin: -.275rem; border-radius: 50%;
  background: #2f7ed8; }
.tw-fired u { position: absolute; top: 50%; height: 1.5px; margin-top: -.75px; background: #2f7ed8; }
.tw-fired.names > span { white-space: normal; line-height: 1.2; }
.tw-fired .ends { display: flex; justify-content: space-between; }
.tw-fired .around { display: grid; grid-template-columns: minmax(0,1fr) auto minmax(0,1.4fr);
  font-family: "Source Code Pro", monospace; font-size: .8rem; }
.tw-fired .around > * { white-space: pre; overflow: hidden; }
.tw-fired .before { display: flex; justify-content: flex-end; opacity: .72; }
.tw-fired .after { opacity: .72; }
.tw-fired mark { background: rgba(47,126,216,.18); color: inherit; border-radius: 3px; }
a.tw-fired:is(:hover, :focus-visible) { background: rgba(47,126,216,.07); }
@media (max-width: 900px) {
  .tw-fired { grid-template-columns: 7rem minmax(3rem,1fr) 6.4rem 3rem 3rem minmax(0,2fr); gap: .5rem; }
}
@media (max-width: 640px) {
  .tw-fired, .tw-fired-rows.bare .tw-fired { grid-template-columns: 6rem minmax(2rem,1fr) 6.2rem 3rem; }
  .tw-fired:not(.names) > span:nth-of-type(n+4), .tw-fired.names > span:nth-of-type(n+5) { display: none; }
}

/* neurons that fire together */
.tw-chips { display: flex; flex-wrap: wrap; gap: .4rem; }
a.tw-chip { display: inline-block; border: 1px solid rgba(139,149,161,.4); border-radius: 999px; padding: .1rem .7rem;
  font-size: .87rem; color: var(--tw-link) !important; text-decoration: none !important; }
a.tw-chip span { color: light-dark(#56606c, #aeb7c2); }
a.tw-chip:is(:hover, :focus-visible) { background: rgba(47,126,216,.07); }

/* what changes without a neuron */
.tw-change { display: grid; grid-template-columns: 11rem minmax(4rem,1fr) 4.4rem 4.4rem 5rem; gap: .8rem;
  padding: .16rem 0; align-items: center; border-bottom: 1px solid rgba(139,149,161,.22); font-size: .87rem;
  color: inherit !important;  text-decoration: none !important; font-variant-numeric: tabular-nums; max-width: 60rem; }
.tw-change.names { opacity: .72; }
.tw-change > span:nth-of-type(n+1) { text-align: right; }
.tw-change.names > span:first-child { text-align: left; }
.tw-change .tw-token { justify-self: start; white-space: pre; overflow: hidden; max-width: 100%; }
.tw-change b { display: block; height: .6rem; border-radius: 2px; background: #c9821f; opacity: .8; }
.tw-change.better b { background: #2f7ed8; }
a.tw-change:is(:hover, :focus-visible) { background: rgba(47,126,216,.07); }

/* the neurons of a token */
.tw-row { display: flex; gap: .7rem; border-bottom: 1px solid rgba(139,149,161,.22); }
.tw-row > .tw-neuron { flex: 1; border-bottom: none; min-width: 0; }
.tw-shade { color: var(--tw-link) !important; text-decoration: none !important; font-size: .83rem; align-self: center;
  padding: .1rem .3rem; }
.tw-row > .tw-fired { flex: 1; border-bottom: none; min-width: 0; }
.tw-its { color: var(--tw-link) !important; text-decoration: none !important; font-size: .87rem; width: 6rem;
  align-self: center; white-space: nowrap; text-align: right; }
.tw-its:is(:hover, :focus-visible) { text-decoration: underline !important; }
.tw-shade:is(:hover, :focus-visible) { text-decoration: underline !important; }
.tw-neuron.writing { grid-template-columns: 6rem 5rem 8rem 4.6rem 4.2rem minmax(0,1fr); }
.tw-neuron .writes { overflow: hidden; white-space: nowrap; text-overflow: ellipsis; }
.tw-neuron .writes .tw-token { font-size: .83rem; white-space: pre; margin-right: .25rem; }
.tw-neuron.writing.names span:nth-child(6) { text-align: left; }
.tw-neuron { display: grid; grid-template-columns: 6rem 5rem minmax(0,1fr) 4.6rem 4.2rem; gap: .7rem;
  align-items: center; padding: .17rem 0; border-bottom: 1px solid rgba(139,149,161,.22); font-size: .87rem;
  color: inherit !important; text-decoration: none !important; font-variant-numeric: tabular-nums; }
.tw-neuron .name { color: var(--tw-link); }
.tw-neuron i { height: .55rem; border-radius: 2px; background: rgba(139,149,161,.2); }
.tw-neuron b { display: block; height: 100%; border-radius: 2px; background: #2f7ed8; opacity: .75; }
.tw-neuron .number, .tw-neuron.names span:nth-child(n+4) { text-align: right; }
.tw-neuron.names { opacity: .72; }
a.tw-neuron:is(:hover, :focus-visible) { background: rgba(47,126,216,.07); }

/* the tokens that a neuron writes */
.tw-logits { display: grid; grid-template-columns: 1fr 1fr; gap: 0 3rem; }
a.tw-logit { display: grid; grid-template-columns: 10.5rem minmax(0,1fr) 4rem; gap: .7rem; align-items: center;
  padding: .12rem 0; color: inherit !important; text-decoration: none !important; }
a.tw-logit > span:first-child { overflow: hidden; white-space: nowrap; text-overflow: ellipsis; }
a.tw-logit .tw-token { font-size: .87rem; white-space: pre; overflow-wrap: normal; }
a.tw-logit:is(:hover, :focus-visible) { background: rgba(47,126,216,.07); }
a.tw-logit b { display: block; height: .7rem; border-radius: 2px; background: #2f7ed8; opacity: .75; }
a.tw-logit.lowered b { background: #8b95a1; }
a.tw-logit .number { text-align: right; font-size: .87rem; font-variant-numeric: tabular-nums; opacity: .8; }

/* claims and their verdicts */
.tw-claims { border-top: 1px solid rgba(139,149,161,.22); }
.tw-claim { display: grid; grid-template-columns: 4fr 14rem 5fr 4fr; gap: 1.4rem; padding: .6rem 0; line-height: 1.4;
  border-bottom: 1px solid rgba(139,149,161,.22); overflow-wrap: anywhere; }
.tw-claim p { margin: 0; }
.tw-claim .claim { font-weight: 600; }
.tw-claim .claim p { font-weight: 400; }
.tw-claim .open { grid-column: 2 / -1; }
.tw-claim img { max-width: 100%; height: auto; }
.tw-verdicts > div { display: grid; grid-template-columns: minmax(0,6fr) 7.2rem minmax(0,6fr) minmax(0,3fr); gap: 1rem;
  line-height: 1.5; font-size: .9rem; border-bottom: 1px solid rgba(139,149,161,.16); }
.tw-verdicts .names { opacity: .72; }
.tw-verdicts .yes { color: var(--tw-link); font-weight: 600; }
.tw-verdicts .part { color: var(--tw-link); }
.tw-verdicts .open { opacity: .72; }
h2.tw-group-title { font-size: 1.05rem; font-weight: 600; margin: 0; padding: .8rem 0 .35rem; }
.tw-verdict { border-radius: 999px; padding: .05rem .6rem; font-size: .83rem; border: 1px solid currentColor; }
.tw-verdict.part { border-color: var(--tw-link); color: var(--tw-link); }
.tw-verdict.yes { background: #1f6fc9; border-color: #1f6fc9; color: #fff; }
@media (max-width: 900px) {
  .tw-verdicts > div { grid-template-columns: minmax(0,1fr) 7.2rem; }
  .tw-verdicts span:nth-child(n+3) { display: none; }
  .tw-claim { grid-template-columns: 1fr; gap: .3rem; }
  .tw-claim .verdict { order: -1; display: flex; gap: .7rem; align-items: baseline; }
  .tw-claim .verdict .tw-verdict { flex: none; }
  .tw-claim .open { grid-column: 1; }
}

/* two runs side by side */
.tw-two { max-width: 62rem; }
.tw-two > div { display: grid; grid-template-columns: 14rem 1fr 1fr; gap: 1.2rem; padding: .3rem 0;
  border-bottom: 1px solid rgba(139,149,161,.22); font-variant-numeric: tabular-nums; }
.tw-two.four > div { grid-template-columns: 14rem 1fr 1fr 1fr; }
.tw-two > div > span { overflow-wrap: anywhere; }
.tw-two > div > span:first-child { opacity: .8; }
.tw-two .names { font-weight: 600; }

.tw-changes { max-width: 80rem; }
.tw-changes > div { display: grid; grid-template-columns: 14rem 6rem 6rem minmax(0,1fr) minmax(0,1fr) 9rem; gap: 1.2rem;
  padding: .25rem 0; border-bottom: 1px solid rgba(139,149,161,.22); font-variant-numeric: tabular-nums;
  align-items: center; }
.tw-changes .names { opacity: .8; }
.tw-changes span { overflow-wrap: anywhere; }
.tw-changes i { position: relative; height: .7rem;
  background: center / 1px 100% no-repeat linear-gradient(rgba(139,149,161,.8), rgba(139,149,161,.8)); }
.tw-changes b { position: absolute; top: 0; height: 100%; border-radius: 2px; background: #8b95a1; opacity: .6; }
.tw-changes b.clear { background: #2f7ed8; opacity: .85; }
.tw-changes b.chance { background: none; border: 1px dashed #8b95a1; box-sizing: border-box; opacity: 1; }
@media (max-width: 900px) {
  .tw-changes > div { grid-template-columns: 8.4rem 4rem 4rem minmax(0,1fr) minmax(0,1fr) 4rem; gap: .6rem;
    font-size: .87rem; }
}

@media (max-width: 640px) {
  .tw-row:has(.tw-its) { flex-wrap: wrap; row-gap: 0; }
  .tw-row:has(.tw-its) > .tw-fired { flex-basis: 100%; }
  .tw-row > .tw-its { width: 100%; padding-bottom: .2rem; }
  .tw-row > .tw-its:empty { display: none; }
  .tw-changes > div { grid-template-columns: minmax(0,1fr) minmax(0,1fr); gap: .1rem .8rem; }
  .tw-changes > div > span:first-child, .tw-changes i { grid-column: 1 / -1; }
  .tw-changes > div:not(.names) > span:first-child { font-weight: 600; }
  .tw-changes .names > :is(:first-child, :last-child) { display: none; }
  .tw-two > div { grid-template-columns: 5.6rem 1fr 1fr; gap: .6rem; }
  .tw-two.four > div { grid-template-columns: 5.6rem 1fr 1fr 1.8fr; }
  .tw-neuron { grid-template-columns: 4.8rem 2rem minmax(0,1fr) 3rem 3.2rem; gap: .4rem; }
  .tw-neuron.writing { grid-template-columns: 4.8rem 2rem 3.4rem 3rem 3.2rem minmax(0,1fr); }
  .tw-logits { grid-template-columns: 1fr; row-gap: .1rem; }
  .tw-example, .tw-example-names { grid-template-columns: minmax(0,1fr) 5rem 4.2rem; }
  .tw-example .words { grid-column: 1 / -1; order: 1; }
  .tw-example-names .words { display: none; }
  .tw-jump { grid-template-columns: 4.6rem minmax(0,1fr) auto minmax(0,1fr) 2.6rem; }
}
</style>"""
