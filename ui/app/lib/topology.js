// A diagram of networks and the instances on them, by node, with addresses.
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

/** The height of the name of a node. */
const NODE_HEIGHT = 22;
/** The x of the line that connects the nodes of a network. */
const BUS = 236;
const GUESTS_X = BUS + 24;

/** Returns the guests by their nodes, with the y and the height of each node. Guests without a node come last. */
function placeNodes(guests) {
  const nodes = new Map();
  for (const guest of guests) nodes.set(guest.vm.node ?? "", [...(nodes.get(guest.vm.node ?? "") ?? []), guest]);
  let y = GAP;
  return [...nodes]
    .sort(([a], [b]) => (a === "") - (b === "") || a.localeCompare(b))
    .map(([name, members]) => {
      const height = NODE_HEIGHT + Math.ceil(members.length / COLUMNS) * (HEIGHT + GAP);
      const placed = { name, members, y, height };
      y += height + GAP;
      return placed;
    });
}

/** A node with its guests on one network. */
function Node({ name, members, y, height, admin }) {
  const title = html`
    <text class="sub" x=${GUESTS_X + GAP} y=${y + 16}>${name === "" ? "not placed" : `Node ${cut(name, 60)}`}</text>
  `;
  return html`
    <rect class="node" x=${GUESTS_X} y=${y} width=${COLUMNS * (WIDTH + GAP) + GAP} height=${height} rx="9" />
    <path class="wire" d=${`M ${BUS} ${y + height / 2} H ${GUESTS_X}`} />
    ${
      admin && name !== ""
        ? html`
            <a href=${link("nodes", name)}>${title}</a>
          `
        : title
    }
    ${members.map(
      ({ vm, nic }, index) => html`
        <${Guest}
          key=${nic.uuid}
          vm=${vm}
          nic=${nic}
          x=${GUESTS_X + GAP + (index % COLUMNS) * (WIDTH + GAP)}
          y=${y + NODE_HEIGHT + Math.floor(index / COLUMNS) * (HEIGHT + GAP)}
        />
      `,
    )}
  `;
}

function Diagram({ net, guests, admin }) {
  const shown = guests.slice(0, MAX_PER_NETWORK);
  const nodes = placeNodes(shown);
  const last = nodes.at(-1);
  const height = Math.max(70, last ? last.y + last.height + GAP : 0);
  return html`
    <svg
      class="topology"
      viewBox=${`0 0 ${GUESTS_X + COLUMNS * (WIDTH + GAP) + 2 * GAP} ${height}`}
      role="group"
      aria-label=${`Network ${net.name}`}
    >
      <path class="wire" d=${`M 206 35 H ${BUS} M ${BUS} ${GAP} V ${height - GAP}`} />
      <a href=${link("networks", net.uuid)}>
        <g transform="translate(6 12)">
          <rect class="net" width="200" height=${HEIGHT} rx="7" />
          <text x="14" y="20">${cut(net.name, 24)}</text>
          <text class="sub" x="14" y="36">
            ${net.netblock}${net.floating_gateway ? ` · via ${net.floating_gateway}` : ""}
          </text>
        </g>
      </a>
      ${nodes.map(
        (node) => html`
          <${Node} key=${node.name} ...${node} admin=${admin} />
        `,
      )}
      ${
        shown.length === 0
          ? html`
              <text class="sub" x=${BUS + 16} y="39">no instances</text>
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

export function Topology({ networks, instances, admin }) {
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
            <div key=${net.uuid} class="scroll"><${Diagram} net=${net} guests=${guests.get(net.uuid)} admin=${admin} /></div>
          `,
        )}
      </div>
    <//>
  `;
}
