// What waits for a person: one line for each call that wants a yes or a no, and its buttons.

import { el, Keyed, place, setText } from "./dom.js";
import { titleOf } from "./panel.js";

/** What a call is about, in one line: the question in its input, or the input itself. */
export function aboutOf({ input, inputShape }) {
  const text = titleOf(input) || JSON.stringify(input ?? inputShape ?? {});
  return text === "{}" ? "" : text.slice(0, 300);
}

class AskView {
  #call = null;
  #text = el("span", { className: "ask-text" });
  #about = el("span", { className: "ask-about" });
  #buttons;

  /** `answer(call, approved)` promises to be taken. */
  constructor(answer) {
    const button = (className, text, approved) => {
      const made = el("button", { type: "button", className }, text);
      made.addEventListener("click", () => this.#say(answer, approved));
      return made;
    };
    this.#buttons = [button("ask", "Yes", true), button("quiet", "No", false)];
    this.node = el("li", { className: "ask-line" }, el("p", {}, this.#text, this.#about), ...this.#buttons);
  }

  async #say(answer, approved) {
    for (const button of this.#buttons) button.disabled = true;
    try {
      await answer(this.#call, approved);
    } catch (error) {
      setText(this.#about, `That was not taken: ${error.message}`);
    }
    for (const button of this.#buttons) button.disabled = false;
  }

  update(call) {
    if (call === this.#call) return;
    this.#call = call;
    const again = call.uncertain ? " It may have happened already." : "";
    setText(this.#text, `May “${call.toolName}” be done?${again}`);
    setText(this.#about, aboutOf(call));
  }
}

/** The questions of a chat, and of the runs below it at any depth. */
export class AsksView {
  node = el("ul", { className: "asks", "aria-label": "waiting for your answer" });
  #views;

  constructor(answer) {
    this.#views = new Keyed(() => new AskView(answer));
  }

  /** `calls`: what waits; a call that a program has to carry out is none of a person's. */
  update(calls) {
    const asks = calls.filter(({ state }) => state === "approval-requested");
    const keys = asks.map(({ runId, toolCallId }) => JSON.stringify([runId, toolCallId]));
    const views = this.#views.take(keys);
    asks.forEach((call, at) => views[at].update(call));
    place(this.node, views.map(({ node }) => node));
    this.node.hidden = asks.length === 0;
  }
}
