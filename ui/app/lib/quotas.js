// Quotas of a namespace.
import { html } from "./view.js";
import { Meter } from "./parts.js";
import { bytes, number } from "./format.js";

/** The quotas that limit what the instances of a namespace have. */
export const CAPACITY = ["instances", "cpus", "memory_mb", "disk_gb"];

const TITLES = {
  cpus: "CPUs",
  memory_mb: "Memory (MB)",
  disk_gb: "Disk (GB)",
  upload_bytes: "Upload data",
  artifact_bytes: "Artifact data",
};

export const quotaTitle = (name) => TITLES[name] ?? name[0].toUpperCase() + name.slice(1).replaceAll("_", " ");
const amount = (name, value) => (name.endsWith("_bytes") ? bytes(value) : number(value));

/** What a namespace uses of a quota. */
export const QuotaUsage = ({ quota, label }) =>
  quota.limit == null
    ? html`
        ${amount(quota.name, quota.used)}
        <span class="muted aside">no limit</span>
      `
    : html`
        <${Meter}
          label=${label}
          used=${quota.used}
          total=${quota.limit}
          text=${`${amount(quota.name, quota.used)} of ${amount(quota.name, quota.limit)}`}
        />
      `;

export function QuotaTable({ quotas, actions }) {
  return html`
    <div class="scroll">
      <table>
        <thead>
          <tr>
            <th>Quota</th>
            <th>Used</th>
            ${
              actions
                ? html`
                    <th class="end"><span class="muted">Limit</span></th>
                  `
                : null
            }
          </tr>
        </thead>
        <tbody>
          ${quotas.map(
            (quota) => html`
              <tr key=${quota.name}>
                <td>${quotaTitle(quota.name)}</td>
                <td><${QuotaUsage} quota=${quota} label=${quotaTitle(quota.name)} /></td>
                ${
                  actions
                    ? html`
                        <td class="end">${actions(quota)}</td>
                      `
                    : null
                }
              </tr>
            `,
          )}
        </tbody>
      </table>
    </div>
  `;
}
