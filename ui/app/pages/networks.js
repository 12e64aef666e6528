// The list of networks, with a topology diagram, and the form that creates one.
import { html, useMemo, useState } from "../lib/view.js";
import { post } from "../lib/api.js";
import { instances, networks, useCollection } from "../lib/live.js";
import { go, link, setQuery, useQueryState } from "../lib/router.js";
import { Check, Failure, Field, Heading, Loading, State } from "../lib/parts.js";
import { FormDialog, useForm } from "../lib/forms.js";
import { Table } from "../lib/table.js";
import { Topology } from "../lib/topology.js";
import { plural } from "../lib/format.js";

const services = (net) =>
  [net.provide_dhcp && "DHCP", net.provide_nat && "NAT", net.provide_dns && "DNS"].filter(Boolean).join(", ") || "–";

function Create({ close, session, admin }) {
  const form = useForm({
    name: "",
    netblock: "10.0.0.0/24",
    namespace: session.namespace,
    provide_dhcp: true,
    provide_nat: true,
    provide_dns: true,
  });
  const create = async ({ namespace, ...rest }) => {
    const own = namespace === session.namespace;
    const network = await post("/networks", own ? rest : { namespace, ...rest });
    networks.touch(network.uuid);
    close();
    go(link("networks", network.uuid));
  };
  return html`
    <${FormDialog} title="Create network" form=${form} verb="Create" run=${create} close=${close}>
      <${Field} label="Name" ...${form.field("name")}><input ...${form.input("name")} autofocus /><//>
      <${Field} label="Netblock" ...${form.field("netblock")} hint="CIDR notation, from /8 to /29">
        <input ...${form.input("netblock")} />
      <//>
      ${
        admin &&
        html`
          <${Field} label="Namespace" ...${form.field("namespace")}><input ...${form.input("namespace")} /><//>
        `
      }
      <${Check} label="Assign addresses by DHCP" ...${form.check("provide_dhcp")} />
      <${Check} label="Reach external networks through NAT" ...${form.check("provide_nat")} />
      <${Check} label="Resolve DNS names" ...${form.check("provide_dns")} />
    <//>
  `;
}

export default function Networks({ route, session, admin }) {
  const { records, loaded, error } = useCollection(networks);
  const vms = useCollection(instances).records;
  const [creating, setCreating] = useState(route.query.has("create"));
  const [view, select] = useQueryState(route, "view", "list");
  const [filter, setFilter] = useState("");
  const used = useMemo(() => {
    const counts = new Map();
    for (const vm of vms)
      for (const nic of vm.interfaces) counts.set(nic.network_uuid, (counts.get(nic.network_uuid) ?? 0) + 1);
    return counts;
  }, [vms]);
  const columns = useMemo(
    () => [
      { id: "name", title: "Name", value: (net) => net.name, width: "minmax(0, 1.5fr)" },
      {
        id: "state",
        title: "State",
        value: (net) => net.state,
        cell: (net) => html`
          <${State} value=${net.state} />
        `,
        width: "minmax(90px, .8fr)",
        phone: "90px",
      },
      {
        id: "netblock",
        title: "Netblock",
        value: (net) => net.netblock,
        cell: (net) => html`
          <code>${net.netblock}</code>
        `,
      },
      {
        id: "namespace",
        title: "Namespace",
        value: (net) => net.namespace,
        cell: (net) => net.namespace ?? "–",
        kind: "wide",
      },
      { id: "services", title: "Services", value: services, kind: "wide" },
      {
        id: "interfaces",
        title: "Interfaces",
        value: (net) => used.get(net.uuid) ?? 0,
        kind: "wide end",
        width: "88px",
      },
    ],
    [used],
  );
  const shown = records.filter((net) =>
    `${net.name} ${net.netblock} ${net.namespace} ${net.state} ${net.uuid}`
      .toLowerCase()
      .includes(filter.toLowerCase()),
  );
  return html`
    <${Heading} title="Networks">
      <div class="switch" role="group" aria-label="View">
        <button type="button" aria-pressed=${view === "list"} onClick=${() => select("list")}>List</button>
        <button type="button" aria-pressed=${view === "topology"} onClick=${() => select("topology")}>Topology</button>
      </div>
      <button type="button" class="primary" onClick=${() => setCreating(true)}>Create network</button>
    <//>
    <div class="toolbar">
      <input
        type="search"
        aria-label="Filter networks"
        placeholder="Filter"
        value=${filter}
        onInput=${(event) => setFilter(event.target.value)}
      />
      <span class="count" role="status">${plural(shown.length, "network")}</span>
    </div>
    <${Failure} error=${error} retry=${() => networks.load()} />
    ${
      !loaded && !records.length
        ? error
          ? null
          : html`
              <${Loading} />
            `
        : view === "topology"
          ? html`
              <${Topology} networks=${shown} instances=${vms} admin=${admin} />
            `
          : html`
              <${Table}
                label="Networks"
                records=${shown}
                columns=${columns}
                keyOf=${(net) => net.uuid}
                href=${(net) => link("networks", net.uuid)}
                empty="There are no networks."
              />
            `
    }
    ${
      creating
        ? html`
            <${Create}
              session=${session}
              admin=${admin}
              close=${() => {
                setCreating(false);
                setQuery({ create: "" });
              }}
            />
          `
        : null
    }
  `;
}
