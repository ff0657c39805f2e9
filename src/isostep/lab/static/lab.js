// Sliders, and answers without a new page. Nothing is computed here: each state is asked from the lab, as its form does.
"use strict";

(() => {
  const form = document.querySelector("form[data-live]");
  if (!form) return;
  const [result, refusal, brief, said] = ["result", "refusal", "brief", "said"].map((id) => document.getElementById(id));
  const controls = [...form.elements].filter((control) => control.name && "default" in control.dataset);
  const sliders = new Map();
  let asking = false;
  let latest = null;
  let saying = 0;
  let settled = here(); // the state of the entry of the history that Back returns to
  let moving = false; // whether a control has moved since

  function here() {
    return location.origin + location.pathname + location.search;
  }

  // A slider beside each field that has a range. Leftmost is "none" where the field may be empty.
  function addSlider(input) {
    const slider = document.createElement("input");
    const optional = "optional" in input.dataset;
    const { least, most, step } = input.dataset;
    slider.type = "range";
    slider.min = optional ? Math.max(0, Number(least) - Number(step)) : least;
    slider.max = most;
    slider.step = step;
    slider.setAttribute("aria-label", `${document.getElementById(`${input.id}-label`).textContent}, slider`);
    slider.addEventListener("input", () => {
      input.value = optional && slider.value === slider.min ? "" : slider.value;
      follow(input);
    });
    input.addEventListener("input", () => follow(input));
    sliders.set(input, slider);
    input.before(slider);
    input.parentElement.classList.add("slides");
  }

  function follow(input) {
    const slider = sliders.get(input);
    if (!slider) return;
    const list = input.value.includes(",");
    slider.disabled = list || input.disabled;
    input.parentElement.classList.toggle("listed", list);
    if (input.value === "") slider.value = slider.min;
    else if (Number.isFinite(Number(input.value))) slider.value = input.value;
    if ("optional" in input.dataset) slider.setAttribute("aria-valuetext", input.value || "none");
  }

  // Rows that a number or a switch shows, and controls that only some choices have.
  function showRows() {
    for (const rows of form.querySelectorAll("[data-rows]")) {
      const count = Number(form.elements[rows.dataset.rows].value);
      const more = form.elements[rows.dataset.more].checked;
      rows.querySelectorAll("[data-row]").forEach((row, index) => {
        row.hidden = index >= count;
      });
      for (const part of rows.querySelectorAll("[data-more-row]")) part.hidden = !more;
    }
    for (const part of form.querySelectorAll("[data-needs]")) {
      const choices = part.dataset.needs.split(" ").map((name) => form.elements[name].value);
      const needed = choices.some((choice) => part.dataset.oneOf.split(" ").includes(choice));
      for (const control of part.querySelectorAll("input[name]")) {
        control.disabled = !needed;
        follow(control);
      }
    }
  }

  function address() {
    const state = new URLSearchParams();
    for (const [name, value] of new FormData(form)) {
      const field = form.elements[name];
      if (!field.closest("[hidden]")) state.append(name, value);
    }
    return `${form.action}?${state}`;
  }

  // The form as an address has it.
  function fill(url) {
    const state = new URL(url).searchParams;
    for (const control of controls) {
      const text = state.get(control.name) ?? control.dataset.default;
      if (control.type === "checkbox") control.checked = text === "1";
      else control.value = text;
      follow(control);
      if (text !== control.dataset.default) control.closest("details")?.setAttribute("open", "");
    }
    showRows();
  }

  function place(html) {
    const scrolled = new Map();
    for (const region of result.querySelectorAll(".scroll")) scrolled.set(region.getAttribute("aria-label"), region.scrollLeft);
    const link = result.contains(document.activeElement) ? document.activeElement.textContent : null;
    result.innerHTML = html;
    for (const region of result.querySelectorAll(".scroll")) {
      region.scrollLeft = scrolled.get(region.getAttribute("aria-label")) ?? 0;
    }
    const links = link === null ? [] : [...result.querySelectorAll("[data-here]")];
    (links.find((other) => other.textContent === link) ?? links[0])?.focus({ preventScroll: true });
  }

  // A refusal stands over the last result, which is dimmed and stays; where there is none, in its place.
  function refuse(html) {
    if (html !== "" && !result.querySelector(".summary")) {
      place(html);
      html = "";
    }
    refusal.innerHTML = html;
    refusal.hidden = html === "";
    result.classList.toggle("stale", html !== "");
    const name = refusal.textContent.split(":", 1)[0].trim();
    for (const control of controls) {
      if (html !== "" && control.name === name) control.setAttribute("aria-invalid", "true");
      else control.removeAttribute("aria-invalid");
    }
  }

  // What the page says now: one line beside the controls of a small screen, and all of it to a screen reader.
  function sentences() {
    return [...(refusal.hidden ? result : refusal).querySelectorAll("[data-summary]")];
  }

  function showBrief() {
    brief.textContent = sentences()[0]?.dataset.brief ?? "";
    brief.classList.toggle("wrong", document.querySelector("#refusal .refused, #result .refused:not(.soft)") !== null);
    brief.hidden = brief.textContent === "";
  }

  function say() {
    showBrief();
    clearTimeout(saying);
    saying = setTimeout(() => {
      said.textContent = sentences().map((sentence) => sentence.textContent).join(" ");
    }, 600);
  }

  // One question at a time; of those that come meanwhile the last is asked next, and the others never.
  async function ask(url) {
    latest = url;
    if (asking) return;
    asking = true;
    form.dataset.asking = "";
    while (latest !== null) {
      const current = latest;
      latest = null;
      const late = setTimeout(() => result.classList.add("waiting"), 150);
      try {
        const answer = await fetch(`${current}${current.includes("?") ? "&" : "?"}fragment=1`);
        const html = await answer.text();
        if (answer.ok) place(html);
        refuse(answer.ok ? "" : html);
        if (moving && current !== here()) history.replaceState(null, "", current);
      } catch {
        refuse('<p class="refused" data-summary data-brief="no answer">The lab does not answer. Is it still running?</p>');
      }
      clearTimeout(late);
      result.classList.remove("waiting");
      say();
    }
    asking = false;
    delete form.dataset.asking;
  }

  // A state of its own in the history; while a control moves, only the address changes.
  function settle(url) {
    moving = false;
    if (here() !== settled) history.replaceState(null, "", settled);
    if (url !== settled) history.pushState(null, "", url);
    settled = url;
  }

  form.addEventListener("input", (event) => {
    const around = event.target.closest("[data-window]");
    for (const control of around ? [] : form.querySelectorAll("[data-window] input")) control.value = "";
    moving = true;
    showRows();
    ask(address());
  });
  form.addEventListener("change", () => settle(address()));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    settle(address());
    ask(settled);
  });
  result.addEventListener("click", (event) => {
    const link = event.target.closest("[data-here]");
    if (!link || event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    const url = link.href.split("#", 1)[0];
    fill(url);
    settle(url);
    ask(url);
  });
  window.addEventListener("popstate", () => {
    if (here() === settled) return; // a place on the same page
    settled = here();
    moving = false;
    fill(settled);
    ask(settled);
  });

  for (const input of form.querySelectorAll("[data-least]")) addSlider(input);
  for (const control of controls) follow(control);
  form.parentElement.classList.add("live");
  showRows();
  showBrief();
})();
