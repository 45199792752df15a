// Plays recordings of terminals (asciinema's format, version 2), which docs/site/hooks.py puts into the page
// beside the links to them. It knows \n, \r, \b, colours and "erase to the end of the line", and no more:
// docs/site/casts.py refuses to write recordings with anything else.
(function () {
  "use strict";

  const COLOURS = ["black", "red", "green", "yellow", "blue", "magenta", "cyan", "white"];

  // The colours and weights that a sequence of numbers asks for, after those that held before.
  function styled(style, numbers) {
    const next = { ...style };
    const codes = numbers === "" ? [0] : numbers.split(";").map(Number);
    for (let index = 0; index < codes.length; index++) {
      const code = codes[index];
      if (code === 0) Object.keys(next).forEach((name) => delete next[name]);
      else if (code === 1) next.bold = true;
      else if (code === 2) next.dim = true;
      else if (code === 22) delete next.bold, delete next.dim;
      else if (code >= 30 && code <= 37) next.colour = COLOURS[code - 30];
      else if (code >= 90 && code <= 97) next.colour = COLOURS[code - 90];
      else if (code === 39) delete next.colour;
      else if (code === 38 || code === 48) index += codes[index + 1] === 5 ? 2 : 4; // other palettes: as the text
    }
    return next;
  }

  // A terminal without end: lines of cells, each a letter and its style.
  class Screen {
    constructor() {
      this.lines = [[]];
      this.column = 0;
      this.style = {};
    }

    write(text) {
      for (const part of text.split(/(\x1b\[[0-9;]*[mK]|[\n\r\b])/)) {
        const line = this.lines[this.lines.length - 1];
        if (part === "\n") {
          this.lines.push([]);
          this.column = 0;
        } else if (part === "\r") this.column = 0;
        else if (part === "\b") this.column = Math.max(0, this.column - 1);
        else if (part.startsWith("\x1b")) {
          if (part.endsWith("K")) line.length = Math.min(line.length, this.column);
          else this.style = styled(this.style, part.slice(2, -1));
        } else
          for (const letter of part) {
            while (line.length < this.column) line.push({ letter: " ", style: {} });
            line[this.column++] = { letter, style: this.style };
          }
      }
    }

    text() {
      return this.lines.map((line) => line.map((cell) => cell.letter).join("").trimEnd()).join("\n");
    }
  }

  // A recording whose pauses are no longer than it asks for.
  function read(text) {
    const lines = text.trim().split("\n").map((line) => JSON.parse(line));
    const head = lines.shift();
    let before = 0;
    let now = 0;
    const events = lines.map(([seconds, , written]) => {
      now += Math.min(seconds - before, head.idle_time_limit || Infinity);
      before = seconds;
      return { at: now, text: written };
    });
    return { head, events, seconds: now };
  }

  function screenAt(cast, seconds) {
    const screen = new Screen();
    for (const event of cast.events) {
      if (event.at > seconds) break;
      screen.write(event.text);
    }
    return screen;
  }

  if (typeof module !== "undefined") {
    module.exports = { Screen, read, screenAt };
    return;
  }

  class Player {
    constructor(place, cast) {
      this.cast = cast;
      this.at = 0;
      this.timer = null;
      this.output = document.createElement("pre");
      this.output.style.height = `${cast.head.height * 1.35}em`;
      this.output.tabIndex = 0;
      this.output.setAttribute("aria-label", `Recording of a terminal: ${cast.head.title}`);
      this.button = document.createElement("button");
      this.button.onclick = () => (this.timer ? this.pause() : this.play());
      this.slider = document.createElement("input");
      Object.assign(this.slider, { type: "range", min: 0, max: cast.seconds, step: 0.1, value: 0 });
      this.slider.setAttribute("aria-label", "Seconds");
      this.slider.oninput = () => this.seek(Number(this.slider.value));
      this.speed = document.createElement("select");
      this.speed.setAttribute("aria-label", "Speed");
      for (const times of [1, 2, 4]) this.speed.add(new Option(`${times}×`, times));
      this.clock = document.createElement("output");
      const controls = document.createElement("div");
      controls.append(this.button, this.slider, this.clock, this.speed);
      place.append(this.output, controls);
      this.pause();
      this.seek(cast.seconds); // the picture before it is played; playing begins anew
    }

    play() {
      if (this.at >= this.cast.seconds) this.seek(0);
      let last = performance.now();
      this.button.textContent = "Pause";
      this.timer = setInterval(() => {
        const now = performance.now();
        this.seek(this.at + ((now - last) / 1000) * Number(this.speed.value));
        last = now;
        if (this.at >= this.cast.seconds) this.pause();
      }, 50);
    }

    pause() {
      clearInterval(this.timer);
      this.timer = null;
      this.button.textContent = "Play";
    }

    seek(seconds) {
      this.at = Math.min(seconds, this.cast.seconds);
      this.slider.value = this.at;
      this.clock.textContent = `${Math.floor(this.at)} / ${Math.floor(this.cast.seconds)} s`;
      this.draw(screenAt(this.cast, this.at));
    }

    // Shows the last lines that fit, as a terminal does, with letters of one style in one element.
    draw(screen) {
      const shown = document.createDocumentFragment();
      for (const line of screen.lines.slice(-this.cast.head.height)) {
        let last = null;
        let span = null;
        for (const { letter, style } of line) {
          if (style !== last) {
            span = document.createElement("span");
            if (style.bold) span.classList.add("bold");
            if (style.dim) span.classList.add("dim");
            if (style.colour) span.classList.add(style.colour);
            shown.append(span);
            last = style;
          }
          span.textContent += letter;
        }
        shown.append("\n");
      }
      this.output.replaceChildren(shown);
      this.output.scrollTop = this.output.scrollHeight; // long lines take several
    }
  }

  document.addEventListener("DOMContentLoaded", () => {
    for (const place of document.querySelectorAll(".springtide-recording")) {
      new Player(place, read(place.querySelector("script").textContent));
    }
  });
})();
