// A diagram of networks and the instances on them, with addresses.
import { html } from "./view.js";
import { link } from "./router.js";
import { Empty, Panel, instanceState, toneOf } from "./parts.js";

const WIDTH = 190;
const HEIGHT = 46;
const GAP = 14;
const MAX_PER_NETWORK = 24;
const COLUMNS = 4;

const cut = (text, length) => (text.length > length ? `${text.slice(0, length - 1)}…` : text);

function Guest({ vm, nic, x, y }) {
  return html`
    <a href=${link("instances", vm.uuid)}>
      <g transform=${`translate(${x} ${y})`}>
        <rect class="box" width=${WIDTH} height=${HEIGHT} rx="7" />
        <circle class=${`dot ${toneOf(instanceState(vm))}`} cx="15" cy="17" r="4" />
        <text x="27" y="21">${cut(vm.name, 20)}</text>
        <text class="sub" x="27" y="37">${nic.ipv4 ?? "no address"}${nic.floating ? ` ⇄ ${nic.floating}` : ""}</text>
      </g>
    </a>
  `;
}

function Diagram({ net, guests }) {
  const shown = guests.slice(0, MAX_PER_NETWORK);
  const rows = Math.max(1, Math.ceil(shown.length / COLUMNS));
  const height = Math.max(70, rows * (HEIGHT + GAP) + GAP);
  const bus = 236;
  return html`
    <svg
      class="topology"
      viewBox=${`0 0 ${bus + 24 + COLUMNS * (WIDTH + GAP)} ${height}`}
      role="group"
      aria-label=${`Network ${net.name}`}
    >
      <path class="wire" d=${`M 206 35 H ${bus} M ${bus} ${GAP} V ${height - GAP}`} />
      ${shown.map(
        (_, index) => html`
          <path class="wire" d=${`M ${bus} ${GAP + Math.floor(index / COLUMNS) * (HEIGHT + GAP) + HEIGHT / 2} h 24`} />
        `,
      )}
      <a href=${link("networks", net.uuid)}>
        <g transform="translate(6 12)">
          <rect class="net" width="200" height=${HEIGHT} rx="7" />
          <text x="14" y="20">${cut(net.name, 24)}</text>
          <text class="sub" x="14" y="36">
            ${net.netblock}${net.floating_gateway ? ` · via ${net.floating_gateway}` : ""}
          </text>
        </g>
      </a>
      ${shown.map(
        ({ vm, nic }, index) => html`
          <${Guest}
            key=${nic.uuid}
            vm=${vm}
            nic=${nic}
            x=${bus + 24 + (index % COLUMNS) * (WIDTH + GAP)}
            y=${GAP + Math.floor(index / COLUMNS) * (HEIGHT + GAP)}
          />
        `,
      )}
      ${
        shown.length === 0
          ? html`
              <text class="sub" x=${bus + 16} y="39">no instances</text>
            `
          : null
      }
    </svg>
    ${
      guests.length > shown.length
        ? html`
            <p class="hint more-guests">and ${guests.length - shown.length} more</p>
          `
        : null
    }
  `;
}

export function Topology({ networks, instances }) {
  if (!networks.length)
    return html`
      <${Empty}>There are no networks.<//>
    `;
  const guests = new Map(networks.map((net) => [net.uuid, []]));
  for (const vm of instances) for (const nic of vm.interfaces) guests.get(nic.network_uuid)?.push({ vm, nic });
  return html`
    <${Panel} title="Topology">
      <div class="body stack">
        ${networks.slice(0, 50).map(
          (net) => html`
            <div key=${net.uuid}><${Diagram} net=${net} guests=${guests.get(net.uuid)} /></div>
          `,
        )}
      </div>
    <//>
  `;
}
