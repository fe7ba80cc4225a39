// Search for pages that were opened from a disk: a browser starts no Worker for file:// addresses.
// Here the worker's script runs in a hidden frame instead, which speaks the same way.
// (The theme would fetch such a script from a server; it skips that where one of this name is given.)
if (location.protocol === "file:") {
  // The theme's list of pages in other languages: it asks a server, and does without one.
  const open = XMLHttpRequest.prototype.open;
  XMLHttpRequest.prototype.open = function (method, url, ...rest) {
    const asked = `${url}`.endsWith("/sitemap.xml") ? "data:text/xml,<urlset/>" : url;
    return open.call(this, method, asked, ...rest);
  };

  // The worker looks for the second name to find its other scripts.
  window.Worker = window.IFrameWorker = class extends EventTarget {
    constructor(script) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.frame.srcdoc = "<!doctype html><title>search</title>";
      this.ready = new Promise((resolve) => {
        this.frame.onload = () => this.start(script).then(resolve);
      });
      document.documentElement.append(this.frame);
    }

    start(script) {
      const inside = this.frame.contentWindow;
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      inside.importScripts = async (...scripts) => {
        for (const each of scripts) await this.run(each);
      };
      return this.run(script);
    }

    run(script) {
      return new Promise((resolve, reject) => {
        const tag = this.frame.contentDocument.createElement("script");
        Object.assign(tag, { src: new URL(script, location), onload: resolve, onerror: reject });
        this.frame.contentDocument.body.append(tag);
      });
    }

    postMessage(data) {
      this.ready.then(() => {
        const inside = this.frame.contentWindow;
        inside.dispatchEvent(new inside.MessageEvent("message", { data }));
      });
    }

    terminate() {
      this.frame.remove();
    }
  };
}
