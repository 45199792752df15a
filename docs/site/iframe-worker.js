// Lets the search work where the site is opened as a file: browsers start no worker from a file, so this runs
// the worker's script in a hidden frame. Elsewhere it does nothing.
(function () {
  "use strict";
  if (location.protocol !== "file:") return;

  class FrameWorker extends EventTarget {
    constructor(url) {
      super();
      this.waiting = []; // messages before the script has run
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.inside = frame.contentWindow;
      // Without this, Firefox replaces the empty document, and what was put into it, a moment later.
      this.inside.document.open();
      this.inside.document.close();
      this.inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.run([url]).then(() => {
        const messages = this.waiting;
        this.waiting = null;
        messages.forEach((data) => this.deliver(data));
      }, (error) => this.dispatchEvent(new ErrorEvent("error", { error, message: error.message })));
      this.inside.importScripts = (...urls) => this.run(urls);
    }

    postMessage(data) {
      if (this.waiting) this.waiting.push(data);
      else this.deliver(data);
    }

    terminate() {
      this.inside.frameElement.remove();
    }

    deliver(data) {
      setTimeout(() => this.inside.dispatchEvent(new MessageEvent("message", { data })));
    }

    // Runs scripts one after the other; a worker's own call ends at once, this one's promise ends with the last.
    async run(urls) {
      for (const url of urls) {
        await new Promise((resolve, reject) => {
          const script = this.inside.document.createElement("script");
          script.src = new URL(url, document.baseURI);
          script.onload = resolve;
          script.onerror = () => reject(new Error(`cannot load ${url}`));
          this.inside.document.body.append(script);
        });
      }
    }
  }

  window.Worker = FrameWorker;
})();
