// Rebalances the cluster: shows the plan, then asks.
import { html } from "./view.js";
import { post } from "./api.js";
import { useLive } from "./live.js";
import { go, link } from "./router.js";
import { Failure, Field, Loading, Meter, toast } from "./parts.js";
import { FormDialog, integer, useForm } from "./forms.js";
import { ShortTable } from "./table.js";
import { plural } from "./format.js";

const percent = (share) => `${Math.round(share * 100)} %`;

function Plan({ plan }) {
  const share = (node, value) => html`
    <${Meter} label=${`Committed share of ${node.name}`} used=${value} total=${1} text=${percent(value)} />
  `;
  return html`
    <p>
      ${
        plan.moves.length
          ? `${plural(plan.moves.length, "instance")} move. The fullest and the emptiest node then differ by ` +
            `${percent(plan.spread_after)} instead of ${percent(plan.spread)} of their capacity.`
          : `No instance moves: ${plan.reason ?? "the nodes are balanced"}`
      }
    </p>
    <${ShortTable}
      columns=${["Node", "Committed now", "Afterwards"]}
      records=${plan.nodes}
      row=${(node) => html`
        <tr key=${node.name}>
          <td>${node.name}</td>
          <td>${share(node, node.share)}</td>
          <td>${share(node, node.share_after)}</td>
        </tr>
      `}
      empty="No node can take instances."
    />
    ${
      plan.moves.length > 0 &&
      html`
        <${ShortTable}
          columns=${["Instance", "From", "To", ["Reason", "wide"]]}
          records=${plan.moves}
          row=${(move) => html`
            <tr key=${move.instance_uuid}>
              <td><a href=${link("instances", move.instance_uuid)}>${move.name}</a></td>
              <td>${move.source}</td>
              <td>${move.target}</td>
              <td class="wide">${move.reason}</td>
            </tr>
          `}
        />
      `
    }
  `;
}

export function Rebalance({ close }) {
  const form = useForm({ max_moves: 10 });
  const maxMoves = integer(form.values.max_moves);
  const plan = useLive(() => post("/admin/rebalance", { dry_run: true, max_moves: maxMoves }), [], [maxMoves]);
  const start = async () => {
    const { operation } = await post("/admin/rebalance", { max_moves: maxMoves });
    close();
    if (operation) go(link("operations", operation.op_type, operation.op_uuid));
    else toast("The nodes are balanced: no instance moves.");
  };
  const shown = form.error ? form : { ...form, error: plan.error };
  return html`
    <${FormDialog}
      title="Rebalance the cluster"
      form=${form}
      verb="Rebalance"
      ready=${plan.value?.moves.length > 0 && !plan.error}
      run=${start}
      close=${close}
      wide
    >
      <${Field} label="Maximum number of moves" name="max_moves" error=${shown.error}>
        <input type="number" min="1" max="100" ...${form.input("max_moves")} />
      <//>
      ${
        plan.error?.field !== "max_moves" &&
        html`
          <${Failure} error=${plan.error} retry=${plan.reload} />
        `
      }
      ${
        plan.value
          ? html`
              <${Plan} plan=${plan.value} />
            `
          : !plan.error &&
            html`
              <${Loading} />
            `
      }
    <//>
  `;
}
