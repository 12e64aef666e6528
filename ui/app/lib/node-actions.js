// Actions on a node: maintenance, drain with its forecast, evacuation of a dead host.
import { html } from "./view.js";
import { post } from "./api.js";
import { useLive } from "./live.js";
import { link } from "./router.js";
import { Action, Check, ConfirmDelete, Dialog, Failure, Loading, State, toast } from "./parts.js";
import { FormDialog, useForm } from "./forms.js";
import { isLost } from "./nodes.js";
import { ShortTable } from "./table.js";
import { plural } from "./format.js";

/** What happens to an instance: tone and text of each outcome. */
const OUTCOMES = {
  migrate: ["good", "migrated while it runs"],
  copy: ["good", "copied; it is off"],
  restart: ["busy", "powered off, copied and started"],
  wait: ["busy", "later"],
  blocked: ["bad", "stays"],
  evacuating: ["busy", "created again"],
  waiting: ["busy", "waits"],
  error: ["bad", "error"],
  deleted: ["idle", "deleted"],
};

/** What happens to each instance of a node, as a drain or an evacuation reports it. */
const Outcomes = ({ records }) => html`
  <${ShortTable}
    columns=${["Instance", ["Namespace", "wide"], "Outcome", "New node"]}
    records=${records}
    row=${(record) => html`
      <tr key=${record.instance_uuid}>
        <td><a href=${link("instances", record.instance_uuid)}>${record.name}</a></td>
        <td class="wide">${record.namespace}</td>
        <td>
          <${State} value=${OUTCOMES[record.outcome]?.[1] ?? record.outcome} tone=${OUTCOMES[record.outcome]?.[0]} />
          ${
            record.reason &&
            html`
              <span class="muted block">${record.reason}</span>
            `
          }
        </td>
        <td>${record.node ?? "–"}</td>
      </tr>
    `}
    empty="The node has no instances."
  />
`;

/** Asks before a drain, and shows what it does to each instance. */
function Drain({ path, name, close, done }) {
  const form = useForm({ stop: false });
  const { stop } = form.values;
  const forecast = useLive(() => post(`${path}/drain`, { dry_run: true, stop }), [], [path, stop]);
  const blocked = (forecast.value?.instances ?? []).filter((record) => record.outcome === "blocked").length;
  const drain = async () => {
    await post(`${path}/drain`, { stop });
    toast(`Draining ${name}.`);
    close();
    done();
  };
  return html`
    <${FormDialog}
      title=${`Drain ${name}?`}
      form=${form}
      verb="Drain"
      ready=${Boolean(forecast.value)}
      run=${drain}
      close=${close}
      wide
    >
      <p>The node gets no new instances, and its instances move to other nodes, two at a time.</p>
      <${Check} label="Power off instances that cannot be migrated while they run" ...${form.check("stop")} />
      <${Failure} error=${forecast.error} retry=${forecast.reload} />
      ${
        forecast.value
          ? html`
              <${Outcomes} records=${forecast.value.instances} />
            `
          : !forecast.error &&
            html`
              <${Loading} />
            `
      }
      ${
        blocked > 0 &&
        html`
          <p class="bad-text">${plural(blocked, "instance")} would stay on the node.</p>
        `
      }
    <//>
  `;
}

/** Asks before the evacuation of a dead host, then shows what happens to each instance. */
function Evacuate({ path, name, count, close, done, show }) {
  const evacuate = async () => {
    const records = await post(`${path}/evacuate`, { dead: true });
    done();
    show(html`
      <${Dialog} title=${`Evacuation of ${name}`} close=${close} wide>
        <div class="body"><${Outcomes} records=${records} /></div>
        <footer><button type="button" class="primary" onClick=${close}>Done</button></footer>
      <//>
    `);
    return false;
  };
  return html`
    <${ConfirmDelete}
      title=${`Evacuate ${name}?`}
      lead="You declare that this host is dead. This cannot be undone:"
      verb="Evacuate"
      items=${[
        `${plural(count, "instance")} of ${name} start on other nodes, from shared storage, replicas or their images`,
        "changes of disks that only this host has are lost",
      ]}
      word=${name}
      kept="Only confirm this if the host does not run: else its VMs run twice until it returns and is fenced."
      run=${evacuate}
      close=${close}
    />
  `;
}

/** The buttons of a node. `show` opens a dialog. */
export function NodeActions({ path, node, count, show, done }) {
  const close = () => show(null);
  const change = async (verb) => {
    await post(`${path}/${verb}`);
    done();
  };
  const alive = node.state === "created";
  const draining = node.cordon?.reason === "drain";
  const common = { path, name: node.name, close, done, show };
  return html`
    ${
      node.cordon
        ? html`
            <${Action} run=${() => change("undrain")}>
              ${!draining ? "End maintenance" : count ? "Cancel drain" : "Undrain"}
            <//>
          `
        : null
    }
    ${
      node.cordon?.reason !== "maintenance" &&
      html`
        <${Action} run=${() => change("maintenance")}>Start maintenance<//>
      `
    }
    ${
      alive &&
      !draining &&
      html`
        <button
          type="button"
          onClick=${() =>
            show(html`
              <${Drain} ...${common} />
            `)}
        >
          Drain
        </button>
      `
    }
    ${
      isLost(node) &&
      html`
        <button
          type="button"
          class="danger"
          onClick=${() =>
            show(html`
              <${Evacuate} ...${common} count=${count} />
            `)}
        >
          Evacuate
        </button>
      `
    }
  `;
}
