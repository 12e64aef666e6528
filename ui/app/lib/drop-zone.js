// An area that files are dropped on. It also has a control that chooses them.
import { html, useState } from "./view.js";

export function DropZone({ label, add, children }) {
  const [over, setOver] = useState(false);
  const drag = (isOver) => (event) => {
    event.preventDefault();
    setOver(isOver);
  };
  const drop = (event) => {
    drag(false)(event);
    add([...event.dataTransfer.files]);
  };
  const choose = (event) => {
    add([...event.target.files]);
    event.target.value = "";
  };
  return html`
    <div class=${`drop ${over ? "over" : ""}`} onDragOver=${drag(true)} onDragLeave=${drag(false)} onDrop=${drop}>
      <p>${children}</p>
      <input type="file" multiple aria-label=${label} onChange=${choose} />
    </div>
  `;
}
