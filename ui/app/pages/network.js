// One network: addresses, interfaces, metadata, events.
import { html, useState } from "../lib/view.js";
import { del, get, post, seg } from "../lib/api.js";
import { instances, useCollection, useLive } from "../lib/live.js";
import { go, link, useQueryState } from "../lib/router.js";
import {
  Action,
  ConfirmDelete,
  CopyId,
  Empty,
  Facts,
  Failure,
  Field,
  Heading,
  Panel,
  State,
  Tabs,
  Time,
  toast,
  Unloaded,
} from "../lib/parts.js";
import { FormDialog, useForm } from "../lib/forms.js";
import { TablePanel } from "../lib/table.js";
import { Metadata } from "../lib/metadata.js";
import { Why } from "../lib/why.js";
import { Timeline } from "../lib/events.js";
import { OperationTable } from "../lib/operation-table.js";
import { shortId } from "../lib/format.js";

const TABS = [
  ["summary", "Summary"],
  ["events", "Events"],
  ["operations", "Operations"],
];

function Reserve({ path, close, done }) {
  const form = useForm({ address: "", comment: "" });
  const reserve = async ({ address, comment }) => {
    await post(`${path}/addresses/${seg(address)}`, { comment: comment || undefined });
    close();
    done();
  };
  return html`
    <${FormDialog}
      title="Reserve address"
      form=${form}
      verb="Reserve"
      ready=${form.values.address}
      run=${reserve}
      close=${close}
    >
      <${Field} label="Address" ...${form.field("address")}><input ...${form.input("address")} autofocus /><//>
      <${Field} label="Comment" ...${form.field("comment")}><input ...${form.input("comment")} /><//>
    <//>
  `;
}

function Addresses({ path, id, vms }) {
  const live = useLive(
    () => get(`${path}/addresses`),
    [`network/${id}`, ...vms.map((vm) => `instance/${vm.uuid}`)],
    [path],
  );
  const [reserving, setReserving] = useState(false);
  const owner = (address) => {
    const vm = vms.find((entry) =>
      entry.interfaces.some((nic) => nic.uuid === address.user_uuid || nic.ipv4 === address.address),
    );
    return vm
      ? html`
          <a href=${link("instances", vm.uuid)}>${vm.name}</a>
        `
      : address.comment || (address.user_uuid ? `${address.user_type ?? ""} ${shortId(address.user_uuid)}` : "");
  };
  const end = (address) =>
    address.type === "manual"
      ? html`
          <${Action}
            run=${async () => {
              await del(`${path}/addresses/${seg(address.address)}`);
              live.reload();
            }}
          >
            Release
          <//>
        `
      : address.type === "routed"
        ? html`
            <${Action}
              run=${async () => {
                await del(`${path}/route/${seg(address.address)}`);
                live.reload();
              }}
            >
              Remove route
            <//>
          `
        : null;
  const row = (address) => html`
    <tr key=${address.address}>
      <td><code>${address.address}</code></td>
      <td>${address.type}</td>
      <td>${owner(address)}</td>
      <td class="wide"><${Time} value=${address.when} /></td>
      <td class="end"><span class="actions">${end(address)}</span></td>
    </tr>
  `;
  return html`
    <${TablePanel}
      title="Addresses"
      actions=${html`
        <${Action}
          run=${async () => {
            toast(`Routed address ${await post(`${path}/route`)}.`);
            live.reload();
          }}
        >
          Route address
        <//>
        <button type="button" onClick=${() => setReserving(true)}>Reserve</button>
      `}
      live=${live}
      columns=${["Address", "Type", "Used by", ["Since", "wide"], ""]}
      row=${row}
      empty="No addresses are in use."
    />
    ${
      reserving &&
      html`
        <${Reserve} path=${path} close=${() => setReserving(false)} done=${live.reload} />
      `
    }
  `;
}

export default function Network({ route }) {
  const id = route.parts[1];
  const path = `/networks/${seg(id)}`;
  const [tab, select] = useQueryState(route, "tab", "summary");
  const [deleting, setDeleting] = useState(false);
  const { value: network, error, reload } = useLive(() => get(path), [`network/${id}`], [path]);
  const vms = useCollection(instances).records.filter((vm) => vm.interfaces.some((nic) => nic.network_uuid === id));
  if (!network)
    return html`
      <${Unloaded} title="Network" up=${["Networks", "#/networks"]} error=${error} retry=${reload} />
    `;
  const yes = (flag) => (flag ? "yes" : "no");
  const gone = ["deleted", "delete-wait"].includes(network.state);
  const remove = async () => {
    await del(path);
    toast(`Deleting ${network.name}.`);
    go("/networks");
  };
  return html`
    <${Heading}
      title=${network.name}
      up=${["Networks", "#/networks"]}
      status=${html`
        <${State} value=${network.state} />
      `}
    >
      ${
        gone || !network.namespace
          ? null
          : html`
              <button type="button" class="danger" onClick=${() => setDeleting(true)}>Delete</button>
            `
      }
    <//>
    ${
      network.error_message
        ? html`
            <div class="failure" role="alert"><p>${network.error_message}</p></div>
          `
        : null
    }
    <${Failure} error=${error} retry=${reload} />
    <${Tabs} tabs=${TABS} current=${tab} select=${select} />
    ${
      tab === "summary"
        ? html`
            <div class="grid">
              <div class="stack two-thirds">
                <${Panel} title="Summary">
                  <${Facts}
                    rows=${[
                      [
                        "Netblock",
                        html`
                          <code>${network.netblock}</code>
                        `,
                      ],
                      ["Namespace", network.namespace ?? "–"],
                      ["DHCP", yes(network.provide_dhcp)],
                      ["NAT", yes(network.provide_nat)],
                      ["DNS", yes(network.provide_dns)],
                      [
                        "Gateway",
                        network.floating_gateway
                          ? html`
                              <code>${network.floating_gateway}</code>
                            `
                          : null,
                      ],
                      ["VXLAN id", network.vxlan_id],
                      [
                        "UUID",
                        html`
                          <${CopyId} value=${network.uuid} />
                        `,
                      ],
                    ]}
                  />
                <//>
                <${Addresses} path=${path} id=${id} vms=${vms} />
              </div>
              <div class="stack third">
                <${Why} path=${path} object=${`network/${network.uuid}`} />
                <${Panel} title="Instances">
                  ${
                    vms.length === 0
                      ? html`
                          <${Empty}>No instance uses this network.<//>
                        `
                      : html`
                          <ul class="problems">
                            ${vms.map(
                              (vm) => html`
                                <li key=${vm.uuid}>
                                  <span class="line-one">
                                    <a href=${link("instances", vm.uuid)}>${vm.name}</a>
                                    <code>
                                      ${vm.interfaces
                                        .filter((nic) => nic.network_uuid === id)
                                        .map((nic) => nic.ipv4 ?? "–")
                                        .join(", ")}
                                    </code>
                                  </span>
                                </li>
                              `,
                            )}
                          </ul>
                        `
                  }
                <//>
                <${Metadata} path=${path} values=${network.metadata} reload=${reload} />
              </div>
            </div>
          `
        : null
    }
    ${
      tab === "events"
        ? html`
            <${Timeline} path=${`${path}/events`} type="network" uuid=${id} />
          `
        : null
    }
    ${
      tab === "operations"
        ? html`
            <${OperationTable} path=${`${path}/clusteroperations?all=true`} objects=${[`network/${id}`]} />
          `
        : null
    }
    ${
      deleting
        ? html`
            <${ConfirmDelete}
              title=${`Delete ${network.name}?`}
              items=${[`the network ${network.name} with the netblock ${network.netblock}`, "its reserved and routed addresses"]}
              kept=${
                vms.length
                  ? `The API refuses this while instances use the network: ${vms
                      .slice(0, 5)
                      .map((vm) => vm.name)
                      .join(", ")}.`
                  : null
              }
              run=${remove}
              close=${() => setDeleting(false)}
            />
          `
        : null
    }
  `;
}
