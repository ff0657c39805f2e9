// Sliders, and answers without a new page. Nothing is computed here: each state is asked from the lab, as its form does.
"use strict";

(() => {
  const form = document.querySelector("form[data-live]");
  if (!form) return;
  const result = document.getElementById("result");
  const said = document.getElementById("said");
  let asking = false;
  let latest = null;
  let saying = 0;

  // A slider beside each field that has a range.
  for (const input of form.querySelectorAll("[data-least]")) {
    const slider = document.createElement("input");
    slider.type = "range";
    slider.min = input.dataset.least;
    slider.max = input.dataset.most;
    slider.step = input.dataset.step;
    slider.setAttribute("aria-label", `${document.getElementById(`${input.id}-label`).textContent}, slider`);
    const follow = () => {
      if (input.value !== "" && Number.isFinite(Number(input.value))) slider.value = input.value;
      if (input.value === "") slider.value = slider.min;
    };
    slider.addEventListener("input", () => {
      input.value = slider.value;
    });
    input.addEventListener("input", follow);
    follow();
    input.before(slider);
    input.parentElement.classList.add("slides");
  }
  form.parentElement.classList.add("live");

  // Rows of a fieldset that a number or a switch shows.
  function showRows() {
    for (const rows of form.querySelectorAll("[data-rows]")) {
      const count = Number(form.elements[rows.dataset.rows].value);
      const more = form.elements[rows.dataset.more].checked;
      rows.querySelectorAll("[data-row]").forEach((row, index) => {
        row.hidden = index >= count;
      });
      for (const part of rows.querySelectorAll("[data-more-row]")) part.hidden = !more;
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

  function place(html) {
    const scrolled = new Map();
    for (const region of result.querySelectorAll(".scroll")) scrolled.set(region.getAttribute("aria-label"), region.scrollLeft);
    result.innerHTML = html;
    for (const region of result.querySelectorAll(".scroll")) {
      region.scrollLeft = scrolled.get(region.getAttribute("aria-label")) ?? 0;
    }
  }

  function say() {
    clearTimeout(saying);
    saying = setTimeout(() => {
      said.textContent = result.querySelector("[data-summary]")?.textContent ?? "";
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
        const answer = await fetch(`${current}&fragment=1`, { headers: { Accept: "text/html" } });
        place(await answer.text());
        history.replaceState(null, "", current);
      } catch {
        result.innerHTML = '<p class="refused" data-summary>The lab does not answer. Is it still running?</p>';
      }
      clearTimeout(late);
      result.classList.remove("waiting");
    }
    asking = false;
    delete form.dataset.asking;
    say();
  }

  form.addEventListener("input", () => {
    showRows();
    ask(address());
  });
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    ask(address());
  });
  showRows();
})();
