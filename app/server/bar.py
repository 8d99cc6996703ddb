"""The script that scrolls the bar's link to the open page into sight, on a page that is narrower than the bar.

Streamlit says of no link that its page is open, and draws the links one by one: the script goes by the address, and
looks again when links come. Where the link is in sight, or the user then scrolls the bar, it stays.
"""

from __future__ import annotations

NAME = "twell-bar.js"
SCRIPT = """const fade = 26; // px at either end: the 1.5 rem over which the bar fades there, and two more
let seen = [];
const toOpenPage = () => {
  const bar = document.querySelector(".st-key-nav");
  if (!bar) return;
  const links = [...bar.querySelectorAll("a[href]")], now = [bar, links.length, location.pathname];
  if (now.every((one, at) => one === seen[at])) return;
  seen = now;
  const name = location.pathname.split("/").pop();
  const link = links.find((one) => one.getAttribute("href").replace("./", "").split("?")[0] === name);
  if (!link) return;
  const there = link.getBoundingClientRect(), frame = bar.getBoundingClientRect();
  if (there.left >= frame.left + fade && there.right <= frame.right - fade) return;
  bar.scrollLeft += there.left + there.width / 2 - frame.left - frame.width / 2;
};
new MutationObserver(toOpenPage).observe(document.documentElement, {childList: true, subtree: true});
"""
