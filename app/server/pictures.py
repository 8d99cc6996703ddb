"""The script behind "Picture" beside each figure's heading: save it, or copy it together with the page's address.

A picture is what the browser shows, on the page's background, with a foot that says what it is: the figure's title and
caption, the run, and the address that leads back. A PNG holds title and address as metadata, too (iTXt chunks `Title`
and `Source`), an SVG as `title` and `desc`. Everything happens in the browser; words become text nodes, never markup.
"""

from __future__ import annotations

NAME = "twell-pictures.js"
SCRIPT = r"""
const SVG = "http://www.w3.org/2000/svg", LINE = 17, MARGIN = 14, SCALE = 2;

addEventListener("click", async (event) => {
  const button = event.target.closest && event.target.closest(".tw-picture button");
  if (!button) return;
  const menu = button.closest(".tw-picture"), told = menu.querySelector("output");
  try {
    told.textContent = await ACTIONS[button.dataset.do](about(menu));
  } catch (error) {
    told.textContent = `This browser refused (${error.name}): save the picture, or take the address from its bar.`;
  }
});

const ACTIONS = {
  async svg(picture) { return save(new Blob([drawing(picture).text], {type: "image/svg+xml"}), picture, "svg"); },
  async png(picture) { return save(await png(picture), picture, "png"); },
  async link(picture) { await navigator.clipboard.writeText(picture.address); return "Copied."; },
  async copy(picture) {
    const words = new Blob([picture.address], {type: "text/plain"});
    await navigator.clipboard.write([new ClipboardItem({"image/png": png(picture), "text/plain": words})]);
    return "Copied: a picture where pictures are pasted, the address where text is.";
  },
};

addEventListener("pointerdown", (event) => close((menu) => !menu.contains(event.target)));
addEventListener("keydown", (event) => { if (event.key === "Escape") close(() => true); });

function close(which) {
  for (const menu of document.querySelectorAll(".tw-picture[open]")) if (which(menu)) menu.open = false;
}

/* The figure of a menu: below it where the menu stands beside a heading, else above it; its title and caption, and the
   address of what is shown. */
function about(menu) {
  const beside = menu.closest(".stHorizontalBlock")?.querySelector(".tw-figure");
  let plot = null, head = beside || null;
  for (const one of document.querySelectorAll(".js-plotly-plot, .tw-figure")) {
    const before = menu.compareDocumentPosition(one) & Node.DOCUMENT_POSITION_PRECEDING;
    if (beside && !before && one.matches(".js-plotly-plot")) { plot = one; break; }
    if (!beside && !before) break;
    if (!beside) { if (one.matches(".tw-figure")) head = one; else plot = one; }
  }
  const address = new URL(location.href), words = (name) => head?.querySelector(name)?.textContent.trim() || "";
  if (!address.searchParams.has("run")) address.searchParams.set("run", menu.dataset.run);
  return {plot, run: menu.dataset.run, title: words("h2"), caption: words("p"), address: address.href};
}

function save(blob, picture, ending) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = `${picture.run}-${picture.title}`.replace(/[^\p{L}\p{N}.-]+/gu, "-").slice(0, 80) + `.${ending}`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60000);
  return `Saved as ${link.download}.`;
}

/* Text in lines of at most `most` letters; a word longer than a line is broken. */
function wrapped(text, most) {
  const lines = [""];
  for (const word of text.split(/\s+/).flatMap((word) => word.match(new RegExp(`.{1,${most}}`, "gu")) || [])) {
    if (lines.at(-1) && lines.at(-1).length + 1 + word.length > most) lines.push(word);
    else lines.push(`${lines.pop()} ${word}`.trim());
  }
  return lines.filter(Boolean);
}

function made(name, attributes, text = "") {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.textContent = text;
  return element;
}

function drawing({plot, run, title, caption, address}) {
  const {width, height} = plot.getBoundingClientRect(), most = Math.floor((width - 2 * MARGIN) / 6.4);
  const foot = [[title, 600], ...wrapped(caption, most).map((line) => [line, 400]), [`Run ${run}`, 400],
                ...wrapped(address, most).map((line) => [line, 400])];
  const tall = height + foot.length * LINE + 2 * MARGIN;
  const page = getComputedStyle(document.querySelector(".stApp"));
  const whole = made("svg", {xmlns: SVG, width, height: tall, viewBox: `0 0 ${width} ${tall}`});
  whole.append(made("title", {}, title), made("desc", {}, `${caption} ${address}`.trim()));
  whole.append(made("rect", {width: "100%", height: "100%", fill: page.backgroundColor}));
  for (const layer of plot.querySelectorAll(".main-svg")) {
    const copy = layer.cloneNode(true), from = layer.querySelectorAll("*"), to = copy.querySelectorAll("*");
    from.forEach((one, index) => {
      if (!one.matches("text, tspan")) return;
      const look = getComputedStyle(one);
      Object.assign(to[index].style, {fill: look.fill, fontFamily: look.fontFamily, fontSize: look.fontSize});
    });
    copy.querySelectorAll(".hoverlayer, .select-outline, .zoomlayer").forEach((one) => one.remove());
    copy.removeAttribute("style");
    whole.append(copy);
  }
  foot.forEach(([text, weight], index) => whole.append(made("text", {
    x: MARGIN, y: height + MARGIN + LINE * (index + 0.6), fill: page.color, "font-family": "sans-serif",
    "font-size": 12, "font-weight": weight}, text)));
  return {text: new XMLSerializer().serializeToString(whole), width, tall};
}

async function png(picture) {
  const {text, width, tall} = drawing(picture), image = new Image();
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(text)}`;
  await image.decode();
  const canvas = Object.assign(document.createElement("canvas"), {width: width * SCALE, height: tall * SCALE});
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  const blob = await new Promise((done) => canvas.toBlob(done, "image/png"));
  const bytes = new Uint8Array(await blob.arrayBuffer()), begin = 33;  // after the signature and the chunk IHDR
  const chunks = [chunk("Title", picture.title), chunk("Source", picture.address)];
  return new Blob([bytes.slice(0, begin), ...chunks, bytes.slice(begin)], {type: "image/png"});
}

/* An iTXt chunk of a PNG: length, type, keyword, no compression, no language, text as UTF-8, checksum. */
function chunk(name, text) {
  const body = new TextEncoder().encode(`iTXt${name}\0\0\0\0\0${text}`);
  const bytes = new Uint8Array(body.length + 8), view = new DataView(bytes.buffer);
  view.setUint32(0, body.length - 4);
  bytes.set(body, 4);
  let crc = -1;
  for (const byte of body) {
    crc ^= byte;
    for (let bit = 0; bit < 8; bit++) crc = crc & 1 ? (crc >>> 1) ^ 0xedb88320 : crc >>> 1;
  }
  view.setUint32(body.length + 4, ~crc >>> 0);
  return bytes;
}
"""
