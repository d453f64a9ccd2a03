"use strict";
// Zoom: the drawing is made wider or narrower in its scrolling frame, around what is in the middle.
document.addEventListener("click", (event) => {
  const button = event.target.closest("button[data-zoom]");
  if (!button) return;
  const frame = button.closest(".timeline").querySelector(".scroll");
  const drawing = frame.querySelector(".zoomed");
  const factor = Number(button.dataset.zoom);
  const before = Number(drawing.dataset.width || 100);
  const width = factor ? Math.min(Math.max(before * factor, 100), 6400) : 100;
  const middle = (frame.scrollLeft + frame.clientWidth / 2) / frame.scrollWidth;
  drawing.dataset.width = width;
  drawing.style.width = width + "%";
  frame.scrollLeft = middle * frame.scrollWidth - frame.clientWidth / 2;
});
// The vertical axis of a chart: linear or logarithmic. The section keeps which, as a live page fills it anew.
document.addEventListener("click", (event) => {
  const button = event.target.closest("button.axis");
  if (button) button.closest("section").toggleAttribute("data-other-axis");
});
