"use strict";
// Draws the page from the JSON in #report. Hazard: keys, texts and names come from files that may be hostile, so everything
// goes into the document as text (textContent, setAttribute), never as HTML; the policy of the page forbids that, too.
(() => {
  const report = JSON.parse(document.getElementById("report").textContent);
  const $ = (id) => document.getElementById(id);
  const PAGE = 60; // cards that are added at a time

  // --- small parts -------------------------------------------------------------------------------------------------------

  function make(tag, properties, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(properties || {})) {
      if (value === undefined || value === null || value === false) continue;
      if (name === "class") element.className = value;
      else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else element.setAttribute(name, value === true ? "" : value);
    }
    element.append(...children.flat().filter((child) => child !== null && child !== undefined));
    return element;
  }

  function draw(tag, attributes, ...children) {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.append(...children);
    return element;
  }

  const integer = (count) => count.toLocaleString("en-US");
  const counted = (count, noun) => `${integer(count)} ${noun}${count === 1 ? "" : "s"}`;

  function bytes(count) {
    const units = ["B", "KB", "MB", "GB", "TB", "PB"];
    let unit = 0;
    for (; count >= 999.5 && unit < units.length - 1; unit++) count /= 1000;
    return `${unit ? count.toPrecision(3) : count} ${units[unit]}`;
  }

  function short(value) {
    if (typeof value !== "number")
      return value === null || value === undefined ? "–" : String(value).replace("inf", "∞").replace("-", "−");
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2).replace(/-/g, "−");
    return (Number.isInteger(value) ? integer(value) : String(Number(value.toPrecision(4)))).replace("-", "−");
  }

  const span = (name, text) => make("span", { class: name, dir: "auto" }, text);
  const hint = (text) => make("p", { class: "hint" }, text);
  const panel = (title, ...children) => make("div", { class: "panel" }, make("h2", {}, title), ...children);
  const pair = ([name, text]) => [make("dt", {}, name), make("dd", { dir: "auto" }, text)];

  function bar(share, text) {
    return draw(
      "svg",
      { viewBox: "0 0 100 10", preserveAspectRatio: "none", "aria-hidden": "true" },
      draw("rect", { class: "back", width: 100, height: 10, rx: 1.2 }),
      draw("rect", { class: "bar", width: Math.max(share * 100, 0.6), height: 10, rx: 1.2 }, draw("title", {}, text)),
    );
  }

  function histogram({ counts, low, high, num_outside }, label) {
    const most = Math.max(1, ...counts);
    const step = 100 / Math.max(counts.length, 12);
    const left = (100 - step * counts.length) / 2;
    const width = (high - low) / counts.length;
    const total = counts.reduce((sum, count) => sum + count, num_outside);
    const bars = counts.map((count, at) => {
      const height = count ? Math.max((count / most) * 40, 0.8) : 0;
      const range = `${short(low + at * width)} to ${short(low + (at + 1) * width)}: ${((count / total) * 100).toFixed(1)}%`;
      const place = { x: left + at * step + step * 0.06, width: step * 0.88, y: 40 - height, height };
      return draw("rect", { class: "bar", ...place }, draw("title", {}, range));
    });
    const shape = { viewBox: "0 0 100 40", preserveAspectRatio: "none" };
    return draw("svg", { ...shape, role: "img", "aria-label": label }, ...bars);
  }

  function barList(rows) {
    const most = Math.max(...rows.map((row) => row.count), 1);
    return make(
      "div",
      { class: "bars" },
      rows.flatMap((row) => [
        make("span", { class: "label mono", title: row.label }, row.label),
        bar(row.count / most, `${row.label}: ${row.text}`),
        make("span", { class: "value" }, row.text),
      ]),
    );
  }

  function marked(text, words) {
    const parts = [];
    const lower = text.toLowerCase();
    if (!words.length || lower.length !== text.length) return [text];
    let done = 0;
    while (done < text.length) {
      let at = -1,
        found = "";
      for (const word of words) {
        const next = lower.indexOf(word, done);
        if (next >= 0 && (at < 0 || next < at)) [at, found] = [next, word];
      }
      if (at < 0) break;
      parts.push(text.slice(done, at), make("mark", {}, text.slice(at, at + found.length)));
      done = at + found.length;
    }
    return [...parts, text.slice(done)];
  }

  // --- overview ----------------------------------------------------------------------------------------------------------

  function showOverview() {
    $("overview-title").textContent = report.title;
    const some =
      report.num_examined === report.num_samples
        ? "all of its samples"
        : `${counted(report.num_examined, "sample")} spread over it`;
    $("lead").textContent = report.num_samples
      ? `A cache of nested tensors. Statistics are those of ${some}.`
      : "A cache without samples.";
    const tiles = [
      [integer(report.num_samples), report.num_samples === 1 ? "sample" : "samples"],
      [integer(report.num_shards), report.num_shards === 1 ? "shard" : "shards"],
      [bytes(report.nbytes), "of tensors"],
      [bytes(report.file_nbytes), "on disk"],
      [integer(report.num_tensors), report.num_tensors === 1 ? "tensor" : "tensors"],
    ];
    if (report.num_marked) tiles.push([integer(report.num_marked), "marked", "warn"]);
    $("tiles").append(
      ...tiles.map(([value, label, kind]) =>
        make("div", { class: `tile ${kind || ""}` }, make("b", {}, value), make("span", {}, label)),
      ),
    );
    $("notes").append(...report.notes.map((note) => make("p", { class: "notice" }, note)));
    const none = (tag) => make(tag, { class: "empty" }, "none");
    $("structure").append(report.structure ? tree(report.structure, 0) : none("p"));
    if (report.structure?.num_samples < report.num_samples)
      $("structure").append(hint(`Counts are those of ${counted(report.structure.num_samples, "sample")}.`));
    $("fingerprint").append(...(report.fingerprint.length ? report.fingerprint.flatMap(pair) : [none("dd")]));
    const shards = report.shards.map(([label, count, samples]) => ({
      label,
      count,
      text: `${integer(samples)} in ${bytes(count)}`,
    }));
    $("shards").append(barList(shards));
    if (report.num_shards > shards.length)
      $("shards").append(hint(`and ${integer(report.num_shards - shards.length)} more`));
    const members = report.members.map(([suffix, count]) => `.${suffix} of ${counted(count, "sample")}`);
    if (members.length) $("shards").append(hint(`Other members: ${members.join(", ")}`));
    $("made").textContent = `wds_tensorcache ${report.version}, ${report.made}`;
  }

  function tree(node, depth) {
    const total = report.structure.num_samples;
    const isEverywhere = node.kind === "more" || node.num_samples === total;
    const lacking = isEverywhere ? "" : ` in ${integer(node.num_samples)} of ${integer(total)}`;
    const name = node.name ? [span("name", node.name), " "] : [];
    if (node.children) {
      const children = node.children.map((child) => make("li", {}, tree(child, depth + 1)));
      const summary = make("summary", {}, ...name, span("type", node.text + lacking));
      return make("details", { open: depth < 3 }, summary, make("ul", {}, children));
    }
    const isTensor = node.kind === "tensor" || node.kind === "ndarray";
    const types = node.types.filter((type) => type !== "tensor");
    const parts = isTensor
      ? [span("tensor", node.text), span("type", types.map((type) => ` or ${type}`).join("") + lacking)]
      : [span("type", `${types.join(" or ")}${lacking} `), span("example", node.text)];
    return make("div", { class: "leaf" }, ...name, ...parts);
  }

  // --- charts and the table of tensors -----------------------------------------------------------------------------------

  function showCharts() {
    const charts = [];
    const largest = [...report.tensors].sort((one, two) => two.nbytes - one.nbytes).slice(0, 12);
    if (largest.length) {
      const rows = largest.map((tensor) => ({
        label: nameOf(tensor),
        count: tensor.nbytes,
        text: `${bytes(tensor.nbytes)} · ${((tensor.nbytes / Math.max(report.nbytes, 1)) * 100).toFixed(1)}%`,
      }));
      charts.push(panel("Bytes of each tensor, in all samples", barList(rows)));
    }
    const sizes = report.sample_sizes;
    if (sizes && sizes.high > sizes.low) {
      const ends = make("div", { class: "ends" }, span("", bytes(sizes.low)), span("", bytes(sizes.high)));
      const chart = histogram(sizes, `sizes of samples from ${bytes(sizes.low)} to ${bytes(sizes.high)}`);
      charts.push(panel("Samples by bytes of their tensors", make("div", { class: "histogram" }, chart, ends)));
    } else if (sizes) {
      const text = `Each sample has ${bytes(sizes.low)} of tensors.`;
      charts.push(panel("Samples by bytes of their tensors", hint(text)));
    }
    const ragged = new Map(); // tensors whose first dimensions vary alike, such as a text and its mask, have one chart
    for (const tensor of report.tensors.filter((one) => one.num_shapes > 1)) {
      const key = tensor.shapes.map(([shape, count]) => `${shape.match(/\d*/g).find(Boolean)} ${count}`).join();
      ragged.set(key, [...(ragged.get(key) || []), tensor]);
    }
    for (const tensors of [...ragged.values()].slice(0, 6)) {
      const { shapes, num_shapes } = tensors[0];
      const common = shapes.slice(0, 8).sort(([one], [two]) => one.localeCompare(two, "en", { numeric: true }));
      const rows = common.map(([label, count]) => ({ label, count, text: integer(count) }));
      const more = num_shapes > rows.length ? [hint(`and ${counted(num_shapes - rows.length, "more shape")}`)] : [];
      charts.push(panel(`Shapes of ${tensors.slice(0, 3).map(nameOf).join(", ")}`, barList(rows), ...more));
    }
    $("charts").append(...charts);
    $("sizes").hidden = !charts.length;
  }

  const nameOf = (tensor) => tensor.name || "(the sample)";

  function showTensors() {
    const shown = report.tensors.length;
    const all = shown < report.num_tensors ? `The first ${integer(shown)} of ${integer(report.num_tensors)} tensors. ` : "";
    $("tensors-hint").textContent = shown
      ? `${all}Numbers are those of ${counted(report.num_examined, "examined sample")}.`
      : "No sample has a tensor.";
    if (!shown) return;
    const [box, body] = statsTable("Tensor", ["Histogram", "Bytes"]);
    const add = (from, to) => body.append(...report.tensors.slice(from, to).map(tensorRow));
    add(0, 40);
    $("tensor-table").append(box);
    if (shown > 40) {
      const all = () => (add(40, shown), more.remove());
      const more = make("button", { type: "button", class: "more", onclick: all }, `Show all ${integer(shown)} tensors`);
      $("tensor-table").append(more);
    }
  }

  const NUMBERS = [["Min", "min"], ["Mean", "mean"], ["Max", "max"], ["Std", "std"], ["NaN", "num_nan"], ["Inf", "num_inf"]];

  // The table and its body, whose rows begin with a name and the numbers.
  function statsTable(first, others, isPlain) {
    const labels = [first, ...NUMBERS.map(([label]) => label), ...others];
    const head = labels.map((label, at) =>
      make("th", { scope: "col", class: at && label !== "Histogram" ? "num" : null }, label),
    );
    const body = make("tbody", {});
    const table = make("table", {}, make("thead", {}, make("tr", {}, head)), body);
    return [make("div", { class: isPlain ? "stats plain" : "stats" }, table), body];
  }

  function statsCells(name, text, stats) {
    const numbers = NUMBERS.map(([label, key]) => {
      const isBad = key.startsWith("num_") && stats && stats[key] > 0;
      return make("td", { class: isBad ? "num bad" : "num", "data-label": label }, stats ? short(stats[key]) : "–");
    });
    const parts = [make("div", { class: "name" }, name), make("div", { class: "dtype" }, text)];
    return [make("td", { class: "wide" }, ...parts), ...numbers];
  }

  function tensorRow(tensor) {
    const some =
      tensor.num_samples < report.num_samples
        ? `, in ${integer(tensor.num_samples)} of ${counted(report.num_samples, "sample")}`
        : "";
    const bins = tensor.stats && tensor.stats.histogram;
    const label = bins && `histogram of ${tensor.name} from ${short(bins.low)} to ${short(bins.high)}`;
    const spark = bins ? histogram(bins, label) : span("empty", tensor.stats ? "" : "no numbers");
    return make(
      "tr",
      {},
      ...statsCells(nameOf(tensor), tensor.dtype + tensor.shape + some, tensor.stats),
      make("td", { class: "spark" }, spark),
      make("td", { class: "num", "data-label": "Bytes" }, bytes(tensor.nbytes)),
    );
  }

  // --- where samples come from -------------------------------------------------------------------------------------------

  const fileSource = {
    async page(words, onlyMarked, begin, count) {
      const samples = [];
      let at = begin;
      for (; at < report.samples.length && samples.length < count; at++) {
        const card = report.samples[at];
        if (onlyMarked && !card.marks.length) continue;
        if (words.length && !words.every((word) => textOf(card).includes(word))) continue;
        samples.push(card);
      }
      return { samples, next: at < report.samples.length ? at : null, searched: at };
    },
    async detail(card) {
      return card;
    },
    total: report.samples.length,
  };

  const serverSource = {
    async page(words, onlyMarked, begin, count) {
      return ask(
        `samples?begin=${begin}&count=${count}&marked=${onlyMarked ? 1 : 0}&query=${encodeURIComponent(words.join(" "))}`,
      );
    },
    async detail(card) {
      return ask(`sample?number=${card.number}`);
    },
    total: report.num_samples,
  };

  const token = new URLSearchParams(location.search).get("token") || "";

  async function ask(path) {
    const answer = await fetch(path, { headers: { "X-Token": token }, cache: "no-store", credentials: "omit" });
    if (!answer.ok) throw new Error(`the server answers ${answer.status}`);
    return answer.json();
  }

  const source = report.mode === "server" ? serverSource : fileSource;
  const texts = new WeakMap();

  function textOf(card) {
    if (!texts.has(card))
      texts.set(card, [card.key, card.name, card.text, ...card.values.map((each) => each[1])].join("\n").toLowerCase());
    return texts.get(card);
  }

  // --- the grid ----------------------------------------------------------------------------------------------------------

  const grid = $("grid");
  let shown = []; // the cards in the grid, in order
  let next = 0; // where the next page begins; null at the end
  let searched = 0;
  let run = 0; // number of the current search; results of earlier ones are ignored
  let isLoading = false;
  let words = [];
  let onlyMarked = false;

  function restart() {
    run++;
    shown = [];
    next = 0;
    searched = 0;
    isLoading = false;
    grid.replaceChildren();
    return load();
  }

  async function load() {
    if (isLoading || next === null) return;
    isLoading = true;
    const mine = run;
    try {
      const found = await source.page(words, onlyMarked, next, PAGE);
      if (mine !== run) return;
      const isFirst = !shown.length;
      grid.append(...found.samples.map((card, at) => item(card, shown.length + at)));
      shown.push(...found.samples);
      if (isFirst && shown.length) cardAt(0).tabIndex = 0;
      ({ next, searched } = found);
    } catch (error) {
      if (mine !== run) return;
      next = null;
      showStatus(`Samples cannot be read: ${error.message}.`);
      return;
    } finally {
      if (mine === run) isLoading = false;
    }
    showStatus();
    requestAnimationFrame(() => {
      if (mine === run && isNear()) load();
    });
  }

  const isNear = () => $("sentinel").getBoundingClientRect().top < innerHeight + 800;

  function showStatus(text) {
    const filtered = words.length || onlyMarked;
    const all = report.num_samples > source.total ? ` shown of ${integer(report.num_samples)} in the cache` : "";
    let found = `${counted(source.total, "sample")}${all}`;
    if (filtered && next !== null) found = `${integer(shown.length)} found in the first ${counted(searched, "sample")}`;
    else if (filtered) found = `${integer(shown.length)} of ${counted(source.total, "sample")}${all}`;
    $("status").textContent = text || found;
  }

  const titleOf = (card) => card.name || card.key;

  function picture(image, card) {
    if (image.error) return make("span", { class: "none" }, `${image.member} ${image.error}`);
    return make("img", {
      src: image.jpeg ? `data:image/jpeg;base64,${image.jpeg}` : `data:image/png;base64,${image.png}`,
      width: image.width,
      height: image.height,
      class: image.jpeg ? "photo" : `pixels ${image.kind}`,
      decoding: "async",
      alt: `${image.member || nameOf(report.tensors[image.tensor])} of ${titleOf(card)}`,
    });
  }

  function item(card, at) {
    const inner = card.pictures.length
      ? picture(card.pictures[0], card)
      : make("span", { class: "none" }, card.error ? "cannot be read" : "no picture");
    const photo = card.pictures.slice(1).find((image) => image.member);
    const inset = photo ? [make("span", { class: "inset" }, picture(photo, card))] : [];
    const badges = make(
      "span",
      { class: "badges" },
      card.marks.slice(0, 2).map((mark) => make("span", { class: "badge" }, mark.short)),
    );
    const chips = card.values
      .filter((each) => each[0] !== card.text_name)
      .slice(0, 4)
      .map(([name, text]) => `${name} ${text.slice(0, 60)}`);
    const body = [make("span", { class: "key" }, ...marked(titleOf(card), words))];
    const text = (card.is_list ? card.text.split("\n").join(" · ") : card.text).slice(0, 400);
    if (text) body.push(make("span", { class: "text", dir: "auto" }, ...marked(text, words)));
    if (chips.length) body.push(make("span", { class: "small" }, chips.join(" · ")));
    const label = `${titleOf(card)}. ${(card.text || "").slice(0, 200)} ${card.marks.map((mark) => mark.short).join(", ")}`;
    const button = make(
      "button",
      {
        type: "button",
        class: `card${card.marks.length ? " has-marks" : ""}`,
        tabindex: -1,
        "aria-label": label,
        onclick: () => open(at),
        onfocus: () => setCurrent(at),
      },
      make("span", { class: "picture" }, inner, ...inset, badges),
      make("span", { class: "body" }, ...body),
    );
    return make("li", {}, button);
  }

  const cardAt = (at) => grid.children[at] && grid.children[at].firstElementChild;
  let current = 0;

  function setCurrent(at) {
    if (cardAt(current)) cardAt(current).tabIndex = -1;
    current = at;
    if (cardAt(at)) cardAt(at).tabIndex = 0;
  }

  function focusCard(at) {
    const bounded = Math.max(0, Math.min(at, shown.length - 1));
    if (!cardAt(bounded)) return;
    setCurrent(bounded);
    cardAt(bounded).focus();
    cardAt(bounded).scrollIntoView({ block: "nearest" });
    if (bounded >= shown.length - 2 * columns()) load();
  }

  function columns() {
    const top = grid.children[0] ? grid.children[0].offsetTop : 0;
    let count = 0;
    while (count < grid.children.length && grid.children[count].offsetTop === top) count++;
    return Math.max(1, count);
  }

  grid.addEventListener("keydown", (event) => {
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    const steps = {
      ArrowLeft: -1,
      ArrowRight: 1,
      ArrowUp: -columns(),
      ArrowDown: columns(),
      Home: -shown.length,
      End: shown.length,
    };
    const step = steps[event.key];
    if (step === undefined) return;
    event.preventDefault();
    const at = current + step;
    if (event.key === "ArrowUp" && at < 0) $("search").focus();
    else if (event.key !== "ArrowDown" || at < shown.length || current < shown.length - 1) focusCard(at);
  });

  // --- one sample --------------------------------------------------------------------------------------------------------

  const detail = $("detail");
  let opened = 0;

  async function open(at) {
    opened = at;
    setCurrent(at);
    const card = shown[at];
    showDetail(card, at);
    if (!detail.open) {
      detail.showModal();
      detail.querySelector('[data-role="close"]').focus();
    }
    if (report.mode !== "server") return;
    try {
      const full = await source.detail(card);
      if (opened === at && detail.open) showDetail(full, at);
    } catch (error) {
      if (opened === at && detail.open)
        detail.append(make("p", { class: "notice" }, `The sample cannot be read: ${error.message}.`));
    }
  }

  function showDetail(card, at) {
    const focused = detail.contains(document.activeElement) ? document.activeElement.dataset.role : "close";
    const step = (label, text, to, role) =>
      make(
        "button",
        { type: "button", class: "step", "aria-label": label, "data-role": role, onclick: () => go(to) },
        text,
      );
    const head = make(
      "div",
      { class: "detail-head" },
      make("h2", { id: "detail-title" }, titleOf(card)),
      step("Previous sample", "←", at - 1, "previous"),
      step("Next sample", "→", at + 1, "next"),
      make("button", { type: "button", class: "close", "data-role": "close", onclick: () => detail.close() }, "Close"),
    );
    const pictures = card.pictures.map((image) =>
      make("figure", {}, picture(image, card), make("figcaption", {}, captionOf(image))),
    );
    const right = make("div", {});
    if (card.marks.length)
      right.append(
        make(
          "ul",
          { class: "marks" },
          card.marks.map((mark) => make("li", {}, mark.text)),
        ),
      );
    if (card.is_list)
      right.append(
        make(
          "ol",
          { class: "detail-text", dir: "auto" },
          card.text.split("\n").map((line) => make("li", {}, ...marked(line, words))),
        ),
      );
    else if (card.text) right.append(make("p", { class: "detail-text", dir: "auto" }, ...marked(card.text, words)));
    const pairs = [
      ["key", card.key],
      ["index", integer(card.number)],
      ...card.values.filter((each) => each[0] !== card.text_name),
    ];
    right.append(make("h3", {}, "Values"), make("dl", { class: "pairs" }, ...pairs.flatMap(pair)));
    if (card.tensors.length) right.append(make("h3", {}, "Tensors"), tensorTable(card));
    const body = make(
      "div",
      { class: `detail-body${pictures.length ? "" : " no-pictures"}` },
      ...(pictures.length ? [make("div", { class: "detail-pictures" }, pictures)] : []),
      right,
    );
    detail.replaceChildren(head, body);
    const again = detail.querySelector(`[data-role="${focused}"]`);
    if (again && detail.open) again.focus();
  }

  function captionOf(image) {
    if (image.member) return image.error ? "" : image.member;
    const tensor = report.tensors[image.tensor];
    return [`${nameOf(tensor)} ${tensor.dtype}`, image.note].filter(Boolean).join(" · ");
  }

  function tensorTable(card) {
    const [box, body] = statsTable("", [], true);
    const rows = card.tensors.map(([number, dtype, shape, stats]) =>
      make("tr", {}, ...statsCells(nameOf(report.tensors[number]), dtype + shape, stats)),
    );
    body.append(...rows);
    if (card.num_more) box.append(hint(`and ${counted(card.num_more, "more tensor")}, not listed`));
    return box;
  }

  async function go(at) {
    if (at >= shown.length) await load();
    if (at >= 0 && at < shown.length && detail.open) open(at);
  }

  detail.addEventListener("keydown", (event) => {
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    if (event.key === "ArrowLeft") go(opened - 1);
    else if (event.key === "ArrowRight") go(opened + 1);
    else return;
    event.preventDefault();
  });
  detail.addEventListener("click", (event) => {
    if (event.target === detail) detail.close();
  });
  detail.addEventListener("close", () => focusCard(opened));

  // --- search ------------------------------------------------------------------------------------------------------------

  const search = $("search");
  let timer = 0;

  function searchNow() {
    clearTimeout(timer);
    const found = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    if (found.join(" ") === words.join(" ")) return;
    words = found;
    const done = restart();
    if (words.length && $("samples").getBoundingClientRect().top > innerHeight * 0.3) $("samples").scrollIntoView();
    return done;
  }

  async function toFirstCard() {
    await searchNow();
    focusCard(0);
  }

  search.addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(searchNow, 150);
  });
  search.addEventListener("keydown", (event) => {
    if (event.key === "ArrowDown") {
      event.preventDefault();
      toFirstCard();
    } else if (event.key === "Escape") {
      event.preventDefault();
      if (search.value) search.value = "";
      else search.blur();
      searchNow();
    }
  });
  $("search-form").addEventListener("submit", (event) => {
    event.preventDefault();
    toFirstCard();
  });
  $("marked").addEventListener("click", () => {
    onlyMarked = !onlyMarked;
    $("marked").setAttribute("aria-pressed", String(onlyMarked));
    restart();
  });
  document.addEventListener("keydown", (event) => {
    const isTyping = /^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName);
    if (event.key !== "/" || isTyping || detail.open || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    search.focus();
    search.select();
  });

  showOverview();
  showCharts();
  showTensors();
  if (!report.num_marked && report.mode === "file") $("marked").hidden = true;
  if (!source.total) showStatus("The cache has no samples.");
  else restart();
  new IntersectionObserver(
    (entries) => {
      if (entries.some((entry) => entry.isIntersecting)) load();
    },
    { rootMargin: "800px" },
  ).observe($("sentinel"));
})();
