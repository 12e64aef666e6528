// The form that creates an instance. The API validates it; its errors are shown at their fields.
import { html, useEffect, useState } from "../lib/view.js";
import { post, withField } from "../lib/api.js";
import { artifacts, instances, networks, nodes, useCollection } from "../lib/live.js";
import { go, link } from "../lib/router.js";
import { Check, Failure, Field, Heading, Icon, RequestId } from "../lib/parts.js";
import { integer } from "../lib/forms.js";

/** Types of artifacts that disks are made from, in the order in which they are offered. */
const IMAGE_TYPES = ["label", "image", "snapshot"];
const SIZES = [
  [1, 256],
  [1, 1024],
  [2, 2048],
  [4, 8192],
];
/** Milliseconds after the last change until the API checks the form. */
const CHECK_PAUSE = 600;
const SHOWN_FIELDS =
  /^(name|cpus|memory|namespace|placed_on|ssh_key|user_data|disk(\[\d+\](\.(size|base|bus|type))?)?|network(\[\d+\](\.(network_uuid|address|float))?)?)$/;

let nextKey = 1;
const newDisk = (base = "") => ({ key: nextKey++, base, size: base ? "" : 8, bus: "" });
const newInterface = (network = "") => ({ key: nextKey++, network, address: "", float: false });

/** Returns the reference by which a disk names an artifact. */
const baseOf = (artifact) => artifact.source_url;

function Base({ value, images, change }) {
  const known = images.some((image) => baseOf(image) === value);
  const [custom, setCustom] = useState(Boolean(value) && !known && images.length > 0);
  if (custom)
    return html`
      <input
        value=${value}
        placeholder="debian:12, https://…, label:name"
        autofocus
        onInput=${(event) => change(event.target.value)}
      />
    `;
  return html`
    <select
      value=${value}
      onChange=${(event) => {
        if (event.target.value === "*") {
          setCustom(true);
          change("");
        } else change(event.target.value);
      }}
    >
      <option value="">Empty disk</option>
      ${images.map(
        (image) => html`
          <option key=${image.uuid} value=${baseOf(image)}>${image.name} · ${image.artifact_type}</option>
        `,
      )}
      <option value="*">Other image…</option>
    </select>
  `;
}

function Disk({ disk, index, images, change, remove, error }) {
  const set = (values) => change({ ...disk, ...values });
  const field = `disk[${index}]`;
  return html`
    <div class="line">
      <${Field}
        label="Image"
        name=${`${field}.base`}
        error=${error?.field === field ? { ...error, field: `${field}.base` } : error}
      >
        <${Base} value=${disk.base} images=${images} change=${(base) => set({ base })} />
      <//>
      <${Field} label="Size (GB)" name=${`${field}.size`} error=${error}>
        <input
          type="number"
          min="1"
          value=${disk.size}
          placeholder=${disk.base ? "that of the image" : ""}
          onInput=${(event) => set({ size: event.target.value })}
        />
      <//>
      <${Field} label="Bus" name=${`${field}.bus`} error=${error}>
        <select value=${disk.bus} onChange=${(event) => set({ bus: event.target.value })}>
          <option value="">virtio (default)</option>
          ${["scsi", "sata", "nvme", "usb"].map(
            (bus) => html`
              <option key=${bus}>${bus}</option>
            `,
          )}
        </select>
      <//>
      <button type="button" class="icon" aria-label=${`Remove disk ${index + 1}`} disabled=${!remove} onClick=${remove}>
        <${Icon} name="close" />
      </button>
    </div>
  `;
}

function Interface({ nic, index, nets, change, remove, error }) {
  const set = (values) => change({ ...nic, ...values });
  const field = `network[${index}]`;
  return html`
    <div class="line">
      <${Field}
        label="Network"
        name=${`${field}.network_uuid`}
        error=${error?.field === field ? { ...error, field: `${field}.network_uuid` } : error}
      >
        <select value=${nic.network} onChange=${(event) => set({ network: event.target.value })}>
          ${nets.map(
            (net) => html`
              <option key=${net.uuid} value=${net.uuid}>${net.name} · ${net.netblock}</option>
            `,
          )}
        </select>
      <//>
      <${Field} label="Address" name=${`${field}.address`} error=${error}>
        <input
          value=${nic.address}
          placeholder="automatic"
          onInput=${(event) => set({ address: event.target.value })}
        />
      <//>
      <${Check} label="Floating" checked=${nic.float} onChange=${(event) => set({ float: event.target.checked })} />
      <button type="button" class="icon" aria-label=${`Remove interface ${index + 1}`} onClick=${remove}>
        <${Icon} name="close" />
      </button>
    </div>
  `;
}

/** Encodes text as Base64 of its UTF-8 bytes. */
const encode = (text) => btoa(Array.from(new TextEncoder().encode(text), (byte) => String.fromCharCode(byte)).join(""));

export default function CreateInstance({ session, admin }) {
  const images = useCollection(artifacts)
    .records.filter((image) => image.state === "created" && IMAGE_TYPES.includes(image.artifact_type))
    .sort(
      (a, b) =>
        IMAGE_TYPES.indexOf(a.artifact_type) - IMAGE_TYPES.indexOf(b.artifact_type) || a.name.localeCompare(b.name),
    );
  const nets = useCollection(networks).records.filter((net) => net.state === "created" && net.namespace);
  const hosts = useCollection(nodes, admin).records.filter((node) => node.is_hypervisor);
  const [form, setForm] = useState({
    name: "",
    cpus: 1,
    memory: 1024,
    placed_on: "",
    ssh_key: "",
    user_data: "",
    uefi: false,
    vdi: "vnc",
    namespace: session.namespace,
  });
  const [disks, setDisks] = useState(null);
  const [nics, setNics] = useState(null);
  const [error, setError] = useState(null);
  const [busy, setBusy] = useState(false);
  const [plan, setPlan] = useState(null);
  const diskList = disks ?? [newDisk(images[0] ? baseOf(images[0]) : "")].map((disk) => ({ ...disk, key: 0 }));
  const nicList = nics ?? nets.slice(0, 1).map((net) => ({ ...newInterface(net.uuid), key: 0 }));
  const input = (name) => ({
    name,
    value: form[name],
    onInput: (event) => setForm({ ...form, [name]: event.target.value }),
  });
  const replace = (list, set) => (index) => (entry) => set(list.map((old, at) => (at === index ? entry : old)));
  const without = (list, index) => list.filter((_, at) => at !== index);
  const body = {
    name: form.name,
    cpus: integer(form.cpus),
    memory: integer(form.memory),
    uefi: form.uefi || undefined,
    namespace: form.namespace !== session.namespace ? form.namespace : undefined,
    placed_on: form.placed_on || undefined,
    ssh_key: form.ssh_key || undefined,
    user_data: form.user_data ? encode(form.user_data) : undefined,
    // The browser shows VNC displays; the default of the API is SPICE.
    video: { model: form.vdi === "vnc" ? "vga" : "qxl", memory: 16384, vdi: form.vdi },
    disk: diskList.map((disk) => ({
      base: disk.base || undefined,
      size: integer(disk.size),
      bus: disk.bus || undefined,
    })),
    network: nicList.map((nic) => ({
      network_uuid: nic.network,
      address: nic.address || undefined,
      float: nic.float || undefined,
    })),
  };
  const wanted = JSON.stringify(body);
  /** Lets the API check the form without creating anything. */
  const check = () => post("/instances", { ...body, dry_run: true });
  const failed = (failure) =>
    setError(withField(failure, ["name", "cpus", "memory", "namespace", "ssh_key", "user_data"]));
  useEffect(() => {
    setPlan(null);
    // An empty form is not checked.
    if (!form.name || busy) return undefined;
    let current = true;
    const timer = setTimeout(() => {
      check().then(
        (instance) => {
          if (!current) return;
          setError(null);
          setPlan(instance);
        },
        (failure) => current && failed(failure),
      );
    }, CHECK_PAUSE);
    return () => {
      current = false;
      clearTimeout(timer);
    };
  }, [wanted, busy]);
  const submit = async (event) => {
    event.preventDefault();
    setBusy(true);
    setError(null);
    try {
      // Without this check, an instance that no node can run would be created and end in an error state.
      await check();
      const instance = await post("/instances", body);
      instances.touch(instance.uuid);
      go(link("instances", instance.uuid));
    } catch (failure) {
      failed(failure);
      setBusy(false);
    }
  };
  return html`
    <${Heading} title="Create instance" up=${["Instances", "#/instances"]} />
    <form class="form" onSubmit=${submit} novalidate>
      <div class="columns">
        <${Field} label="Name" name="name" error=${error} hint="A DNS label, such as web-1">
          <input ...${input("name")} autofocus autocomplete="off" spellcheck="false" required />
        <//>
        ${
          admin
            ? html`
                <${Field} label="Namespace" name="namespace" error=${error}>
                  <input ...${input("namespace")} autocomplete="off" />
                <//>
              `
            : null
        }
      </div>
      <div class="columns">
        <${Field} label="CPUs" name="cpus" error=${error}><input type="number" min="1" ...${input("cpus")} /><//>
        <${Field} label="Memory (MB)" name="memory" error=${error}>
          <input type="number" min="64" step="64" ...${input("memory")} />
        <//>
        <div class="field">
          <span class="label">Common sizes</span>
          <div class="actions">
            ${SIZES.map(
              ([cpus, memory]) => html`
                <button type="button" key=${memory} onClick=${() => setForm({ ...form, cpus, memory })}>
                  ${cpus} × ${memory >= 1024 ? `${memory / 1024} GB` : `${memory} MB`}
                </button>
              `,
            )}
          </div>
        </div>
      </div>
      <fieldset>
        <legend>Disks</legend>
        ${diskList.map(
          (disk, index) => html`
            <${Disk}
              key=${disk.key}
              disk=${disk}
              index=${index}
              images=${images}
              error=${error}
              change=${replace(diskList, setDisks)(index)}
              remove=${diskList.length > 1 ? () => setDisks(without(diskList, index)) : null}
            />
          `,
        )}
        <div><button type="button" onClick=${() => setDisks([...diskList, newDisk()])}>Add disk</button></div>
      </fieldset>
      <fieldset>
        <legend>Interfaces</legend>
        ${nicList.map(
          (nic, index) => html`
            <${Interface}
              key=${nic.key}
              nic=${nic}
              index=${index}
              nets=${nets}
              error=${error}
              change=${replace(nicList, setNics)(index)}
              remove=${() => setNics(without(nicList, index))}
            />
          `,
        )}
        <div>
          ${
            nets.length
              ? html`
                  <button type="button" onClick=${() => setNics([...nicList, newInterface(nets[0].uuid)])}>
                    Add interface
                  </button>
                `
              : html`
                  <span class="hint">
                    No networks yet.
                    <a href="#/networks?create=1">Create a network</a>
                    first, or create the instance without a network.
                  </span>
                `
          }
        </div>
      </fieldset>
      <details>
        <summary class="quiet-summary">More options</summary>
        <div class="form more">
          ${
            admin
              ? html`
                  <${Field} label="Node" name="placed_on" error=${error} hint="Empty: the scheduler chooses">
                    <select ...${input("placed_on")}>
                      <option value="">Automatic</option>
                      ${hosts.map(
                        (node) => html`
                          <option key=${node.name}>${node.name}</option>
                        `,
                      )}
                    </select>
                  <//>
                `
              : null
          }
          <${Field} label="SSH public key" name="ssh_key" error=${error}>
            <input ...${input("ssh_key")} placeholder="ssh-ed25519 …" />
          <//>
          <${Field} label="User data" name="user_data" error=${error} hint="cloud-init user data, as text">
            <textarea ...${input("user_data")}></textarea>
          <//>
          <${Field} label="Display" name="video" error=${error}>
            <select ...${input("vdi")}>
              <option value="vnc">VNC: shown in the browser</option>
              <option value="spice">SPICE: for virt-viewer</option>
            </select>
          <//>
          <${Check}
            label="Boot with UEFI firmware"
            checked=${form.uefi}
            onChange=${(event) => setForm({ ...form, uefi: event.target.checked })}
          />
        </div>
      </details>
      ${
        error && !SHOWN_FIELDS.test(error.field ?? "")
          ? html`
              <${Failure} error=${error} />
            `
          : error
            ? html`
                <${RequestId} error=${error} />
              `
            : null
      }
      ${
        error?.body?.instance_uuid
          ? html`
              <p class="hint">
                The
                <a href=${link("instances", error.body.instance_uuid)}>failed instance</a>
                is kept for inspection.
              </p>
            `
          : null
      }
      <div class="form-footer">
        <span class="hint" role="status">
          ${plan && `Checked: it would run${plan.node ? ` on ${plan.node}` : ""}.`}
        </span>
        <a class="button" href="#/instances">Cancel</a>
        <button class="primary" disabled=${busy}>Create</button>
      </div>
    </form>
  `;
}
