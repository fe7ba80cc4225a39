// The page of `anytrain watch --web`: asks its server for what is new, and shows it in place.
"use strict";

(() => {
  const AGAIN_MS = 2000;
  const at = (id) => document.getElementById(id);
  const token = new URLSearchParams(location.search).get("token") ?? "";
  let since = 0;

  function make(name, text, kind) {
    const made = document.createElement(name);
    made.textContent = text;
    if (kind) made.className = kind;
    return made;
  }

  function write(place, text) {
    if (place.textContent !== text) place.textContent = text;
  }

  function showProgress(state) {
    const known = Number.isFinite(state.step);
    at("progress").hidden = !known;
    if (!known) return;
    const { step, total } = state;
    const bar = at("bar");
    bar.hidden = !total;
    if (total) {
      bar.max = total;
      bar.value = Math.min(step, total);
    }
    const share = total ? ` (${Math.floor((100 * step) / total)} %)` : "";
    const of = total ? ` of ${total.toLocaleString("en")}` : "";
    write(at("count"), `step ${step.toLocaleString("en")}${of}${share}`);
  }

  function showFacts(facts) {
    const pairs = facts.map(([name, value]) => {
      const pair = document.createElement("div");
      pair.append(make("dt", name), make("dd", value));
      return pair;
    });
    at("facts").replaceChildren(...pairs);
  }

  function showLedger(ledger, caption) {
    const head = document.createElement("tr");
    for (const [text, kind] of [["time", ""], ["seconds", "number"], ["share", "number"], ["what", ""]]) {
      const cell = make("th", text, kind);
      cell.scope = "col";
      head.append(cell);
    }
    const rows = ledger.map(([name, seconds, share, meaning]) => {
      const row = document.createElement("tr");
      const first = make("th", name);
      first.scope = "row";
      row.append(first, make("td", seconds.toFixed(1), "number"),
        make("td", `${(100 * share).toFixed(1)}%`, "number"), make("td", meaning));
      return row;
    });
    const table = document.createElement("table");
    const top = document.createElement("thead");
    const body = document.createElement("tbody");
    top.append(head);
    body.append(...rows);
    table.append(make("caption", caption), top, body);
    at("ledger").replaceChildren(table);
  }

  function section(id, any) {
    at(id).hidden = !any;
    at(id).previousElementSibling.hidden = !any;
  }

  function show(state) {
    document.title = `${state.name}: ${state.kind}`;
    write(document.querySelector("h1"), state.name);
    const words = at("words");
    words.className = `state ${state.kind}`;
    write(words, state.words);
    showProgress(state);
    showFacts(state.facts ?? []);
    showLedger(state.ledger ?? [], state.spent ?? "");
    section("ledger", state.ledger?.length);
    write(at("entries"), (state.entries ?? []).join("\n"));
    section("entries", state.entries?.length);
    at("events").replaceChildren(...(state.events ?? []).map((text) => make("li", text)));
    section("events", state.events?.length);
  }

  // A chart that arrives makes others narrower: those that had a row to themselves.
  function fit() {
    for (const plot of Object.values(anytrain.plots)) {
      const width = plot.root.parentElement.clientWidth;
      if (width !== plot.width) plot.setSize({ width, height: plot.height });
    }
  }

  function take(news) {
    since = news.version;
    if (news.state) show(news.state);
    if (!news.charts) return;
    anytrain.update(news);
    fit();
  }

  function lost(why) {
    const place = at("lost");
    place.hidden = !why;
    write(place, why);
  }

  const pause = (ms) => new Promise((done) => setTimeout(done, ms));

  // Nobody looks at a hidden tab: it asks again when it is shown.
  function visible() {
    if (!document.hidden) return Promise.resolve();
    return new Promise((done) => {
      const seen = () => {
        if (document.hidden) return;
        document.removeEventListener("visibilitychange", seen);
        done();
      };
      document.addEventListener("visibilitychange", seen);
    });
  }

  async function ask() {
    const reply = await fetch(`data?token=${encodeURIComponent(token)}&since=${since}`);
    if (reply.status === 403) return false;
    if (!reply.ok) throw new Error(`status ${reply.status}`);
    take(await reply.json());
    return true;
  }

  async function listen() {
    for (;;) {
      await visible();
      try {
        if (!(await ask())) {
          lost("Connection lost: another server answers now. Open the address that it printed.");
          return;
        }
        lost("");
      } catch {
        lost("Connection lost: `anytrain watch` does not answer. Trying again ...");
        await pause(AGAIN_MS);
      }
    }
  }

  take(JSON.parse(at("anytrain-watch").textContent));
  listen();
})();
