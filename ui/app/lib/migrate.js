// Migrates an instance to another node.
import { html } from "./view.js";
import { post } from "./api.js";
import { nodes, useCollection } from "./live.js";
import { Check, Field } from "./parts.js";
import { FormDialog, integer, useForm } from "./forms.js";

export function Migrate({ instance, path, admin, close, done }) {
  // Only `system` may list nodes; for others the scheduler chooses.
  const hosts = useCollection(nodes, admin).records.filter(
    (node) => node.is_hypervisor && node.state === "created" && node.name !== instance.node,
  );
  const form = useForm({ target: "", stop: false, auto_converge: false, bandwidth_limit_mbps: "" });
  const isOn = ["on", "paused"].includes(instance.power_state);
  const migrate = async (values) => {
    await post(`${path}/migrate`, {
      target: values.target || undefined,
      stop: values.stop || undefined,
      auto_converge: values.auto_converge || undefined,
      bandwidth_limit_mbps: integer(values.bandwidth_limit_mbps),
    });
    close();
    done();
  };
  return html`
    <${FormDialog} title=${`Migrate ${instance.name}`} form=${form} verb="Migrate" run=${migrate} close=${close}>
      <p>
        ${
          isOn
            ? `The guest is not restarted. If anything fails, it continues on ${instance.node}.`
            : "The instance is off: its disks are copied."
        }
      </p>
      ${
        admin &&
        html`
          <${Field} label="Node" ...${form.field("target")}>
            <select ...${form.input("target")}>
              <option value="">Automatic: the scheduler chooses</option>
              ${hosts.map(
                (node) => html`
                  <option key=${node.name} value=${node.name}>${node.name}</option>
                `,
              )}
            </select>
          <//>
        `
      }
      <${Field} label="Bandwidth limit (Mbit/s)" ...${form.field("bandwidth_limit_mbps")} hint="Empty: unlimited">
        <input type="number" min="1" ...${form.input("bandwidth_limit_mbps")} />
      <//>
      ${
        isOn &&
        html`
          <${Check}
            label="Slow the guest down if it changes its memory faster than it is copied"
            ...${form.check("auto_converge")}
          />
          <${Check} label="Power it off, and start it on the other node" ...${form.check("stop")} />
        `
      }
    <//>
  `;
}
