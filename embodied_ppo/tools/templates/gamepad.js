let last = "axes";
setInterval(() => {
  const pad = [...navigator.getGamepads()].find(x => x && x.connected);
  const axes = pad ? pad.axes.map(x => Math.abs(x) < 0.1 ? 0 : +x.toFixed(2)) : [];
  const text = ["axes", ...axes].join(" ");
  const field = [...document.querySelectorAll("input")].find(x => x.value.startsWith("axes"));
  if (text === last || !field) return;
  last = text;
  Object.getOwnPropertyDescriptor(HTMLInputElement.prototype, "value").set.call(field, text);
  field.dispatchEvent(new Event("input", {bubbles: true}));
}, 50);
