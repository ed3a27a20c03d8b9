// A page that is opened from the disk may not start a worker: the search runs in a hidden frame.
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inner = frame.contentWindow;
      inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.send = (data) => inner.dispatchEvent(new MessageEvent("message", { data }));
      this.waiting = new Promise((loaded) => {
        const script = inner.document.createElement("script");
        script.src = new URL(url, location.href);
        script.onload = loaded;
        inner.document.head.append(script);
      });
    }
    postMessage(data) {
      this.waiting.then(() => this.send(data));
    }
    terminate() {}
  };
}
