//! What apply will do with each object, before it does anything.

use std::collections::BTreeSet;
use std::fmt;

use serde_json::{Value, json};

use super::compare::{Difference, differences};
use super::manifest::{Declared, Identity};
use super::observed::{Cluster, Condition, Observed};
use super::ownership::{MARK, Mark, ObjectSet};
use super::schema::Kind;
use crate::api::{Client, ListQuery};
use crate::output::{Table, compact, escape_control, or_dash};

/// What happens to an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Action {
    Create,
    Update,
    /// It exists and was not created by apply: it is changed like others and never deleted.
    Adopt,
    /// It is deleted and created again.
    Replace,
    Delete,
    /// It was adopted and then removed from the files: apply removes its mark.
    Release,
    /// It is as described, but its creation is not complete.
    Wait,
    Unchanged,
    /// It differs and cannot be changed.
    Blocked,
}

impl Action {
    pub(super) const ALL: [Self; 9] = [
        Self::Create,
        Self::Update,
        Self::Adopt,
        Self::Replace,
        Self::Delete,
        Self::Release,
        Self::Wait,
        Self::Unchanged,
        Self::Blocked,
    ];

    pub(super) fn word(self) -> &'static str {
        match self {
            Self::Create => "create",
            Self::Update => "update",
            Self::Adopt => "adopt",
            Self::Replace => "replace",
            Self::Delete => "delete",
            Self::Release => "release",
            Self::Wait => "wait",
            Self::Unchanged => "unchanged",
            Self::Blocked => "blocked",
        }
    }

    /// Returns whether the action changes the cluster.
    pub(super) fn is_change(self) -> bool {
        !matches!(self, Self::Wait | Self::Unchanged | Self::Blocked)
    }
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.word())
    }
}

/// An object and what happens to it.
#[derive(Debug)]
pub(super) struct Step {
    pub(super) action: Action,
    pub(super) identity: Identity,
    pub(super) declared: Option<Declared>,
    pub(super) observed: Option<Observed>,
    pub(super) differences: Vec<Difference>,
}

/// The actions for all objects, and why some are impossible.
#[derive(Debug, Default)]
pub(super) struct Plan {
    pub(super) steps: Vec<Step>,
    pub(super) problems: Vec<String>,
    /// The number of objects of the set that were removed from the files and are kept.
    pub(super) kept: usize,
}

/// How to plan.
#[derive(Debug)]
pub(super) struct Planner<'a> {
    pub(super) client: &'a Client,
    pub(super) cluster: &'a Cluster,
    pub(super) set: &'a ObjectSet,
    pub(super) replace: bool,
    pub(super) prune: bool,
}

impl Planner<'_> {
    pub(super) async fn plan(&self, declared: Vec<Declared>) -> anyhow::Result<Plan> {
        let mut plan = Plan::default();
        let described: BTreeSet<Identity> = declared.iter().map(|object| object.identity.clone()).collect();
        for object in declared {
            let step = self.step(object, &mut plan.problems).await?;
            plan.steps.push(step);
        }
        replace_instances_of_replaced_networks(&mut plan, self.cluster);
        for object in &self.cluster.objects {
            let is_of_set = object.mark.as_ref().is_some_and(|mark| mark.is_of(self.set));
            if !is_of_set || described.contains(&object.identity) {
                continue;
            }
            if !self.prune {
                plan.kept += 1;
                continue;
            }
            let created = object.mark.as_ref().is_some_and(|mark| mark.created);
            plan.steps.push(Step {
                action: if created { Action::Delete } else { Action::Release },
                identity: object.identity.clone(),
                declared: None,
                observed: Some(object.clone()),
                differences: vec![],
            });
        }
        self.check_deletions(&mut plan).await?;
        plan.steps.sort_by(|a, b| a.identity.cmp(&b.identity));
        Ok(plan)
    }

    async fn step(&self, declared: Declared, problems: &mut Vec<String>) -> anyhow::Result<Step> {
        let location = escape_control(&declared.location);
        let identity = declared.identity.clone();
        let title = identity.title();
        let mut block = |reason: String| problems.push(format!("{location}: {title}: {reason}"));
        let observed = match self.cluster.find(&declared) {
            Ok(observed) => observed.cloned(),
            Err(reason) => {
                block(reason);
                let differences = vec![];
                return Ok(Step {
                    action: Action::Blocked,
                    identity,
                    declared: Some(declared),
                    observed: None,
                    differences,
                });
            }
        };
        let Some(object) = &observed else {
            let differences = vec![];
            return Ok(Step {
                action: Action::Create,
                identity,
                declared: Some(declared),
                observed,
                differences,
            });
        };
        let differences = differences(self.client, self.cluster, &declared, object).await?;
        let action = match self.blocked(object, &differences) {
            Some(reason) => {
                block(reason);
                Action::Blocked
            }
            None => self.action(&declared, object, &differences),
        };
        Ok(Step { action, identity, declared: Some(declared), observed, differences })
    }

    /// Returns why an object cannot become as described, if it cannot.
    fn blocked(&self, object: &Observed, differences: &[Difference]) -> Option<String> {
        let kind = object.identity.kind;
        if let Some(mark) = object.mark.as_ref().filter(|mark| !mark.is_of(self.set)) {
            return Some(format!(
                "it belongs to set {} of namespace {}; give --set {0} if these are its files, or release it with `muster {kind} \
                 delete-metadata … {MARK}`",
                escape_control(&mark.set),
                escape_control(&mark.owner),
            ));
        }
        let reason = replacement_reason(object, differences)?;
        match &object.mark {
            Some(mark) if mark.created && self.replace => None,
            Some(mark) if mark.created => {
                let loss = if kind == Kind::Instance { ", without the content of its disks" } else { "" };
                Some(format!("{reason}; give --replace to delete it and create it again{loss}"))
            }
            _ => Some(format!(
                "{reason}; apply did not create it and never deletes it: delete it yourself, or change the file"
            )),
        }
    }

    fn action(&self, declared: &Declared, object: &Observed, differences: &[Difference]) -> Action {
        let Some(mark) = &object.mark else { return Action::Adopt };
        if replacement_reason(object, differences).is_some() {
            Action::Replace
        } else if !differences.is_empty() || *mark != mark.clone().with_entries(declared) {
            Action::Update
        } else if object.condition == Condition::Pending {
            Action::Wait
        } else {
            Action::Unchanged
        }
    }

    /// Finds objects that would prevent deletions, or would be deleted although apply did not create them.
    async fn check_deletions(&self, plan: &mut Plan) -> anyhow::Result<()> {
        let deleted: BTreeSet<String> = plan.steps.iter().filter_map(deleted_id).collect();
        let mut problems = vec![];
        for step in plan.steps.iter().filter(|step| deleted_id(step).is_some()) {
            let Some(object) = &step.observed else { continue };
            let title = step.identity.title();
            match step.identity.kind {
                Kind::Network => {
                    let interfaces =
                        self.client.network_interfaces(&object.id, &ListQuery::default()).await?;
                    let users: BTreeSet<String> =
                        interfaces.value()?.into_iter().map(|used| used.instance_uuid.to_string()).collect();
                    let others: Vec<&str> = users.difference(&deleted).map(String::as_str).collect();
                    if !others.is_empty() {
                        problems.push(format!(
                            "{title} cannot be deleted: it has interfaces of instances that stay: {}",
                            others.join(", ")
                        ));
                    }
                }
                Kind::Namespace => {
                    let inside = self.cluster.objects.iter().filter(|other| {
                        other.identity.namespace.as_deref() == Some(object.id.as_str())
                            && !is_deleted(other, plan)
                    });
                    let inside: Vec<String> = inside.map(|other| other.identity.title()).collect();
                    if !inside.is_empty() {
                        problems.push(format!(
                            "{title} cannot be deleted: it has objects that stay: {}",
                            inside.join(", ")
                        ));
                    }
                }
                Kind::Issuer | Kind::Rule | Kind::Artifact | Kind::Instance => {}
            }
        }
        plan.problems.extend(problems);
        Ok(())
    }
}

/// Returns why an object must be deleted and created again, if it must.
fn replacement_reason(object: &Observed, differences: &[Difference]) -> Option<String> {
    if let Condition::Failed(reason) = &object.condition
        && object.identity.kind != Kind::Artifact
    {
        return Some(format!("it has failed: {}", escape_control(reason)));
    }
    let fixed: Vec<String> =
        differences.iter().filter(|difference| difference.edits.is_none()).map(describe).collect();
    (!fixed.is_empty()).then(|| format!("it cannot be changed in place: {}", fixed.join(", ")))
}

/// An interface keeps its network, so an instance is replaced together with its network.
fn replace_instances_of_replaced_networks(plan: &mut Plan, cluster: &Cluster) {
    let replaced = plan
        .steps
        .iter()
        .filter(|step| step.action == Action::Replace && step.identity.kind == Kind::Network);
    let replaced: BTreeSet<String> =
        replaced.filter_map(|step| step.observed.as_ref().map(|object| object.id.clone())).collect();
    let mut problems = vec![];
    for step in plan.steps.iter_mut().filter(|step| step.identity.kind == Kind::Instance) {
        let Some(object) = &step.observed else { continue };
        let interfaces = object.record["interfaces"].as_array().into_iter().flatten();
        let networks = interfaces.filter_map(|interface| interface["network_uuid"].as_str());
        let Some(network) = networks.into_iter().find(|network| replaced.contains(*network)) else {
            continue;
        };
        if matches!(step.action, Action::Replace | Action::Blocked) {
            continue;
        }
        let name = cluster.objects.iter().find(|object| object.id == network);
        let name = name.map_or_else(|| network.to_owned(), |object| object.identity.name.clone());
        let replacement = json!(format!("the replaced network {name}"));
        step.differences.push(Difference {
            field: "network".to_owned(),
            from: json!(name),
            to: replacement,
            edits: None,
        });
        if object.mark.as_ref().is_some_and(|mark| mark.created) {
            step.action = Action::Replace;
        } else {
            let title = step.identity.title();
            problems.push(format!(
                "{title}: its network is replaced, and apply did not create it and never deletes it"
            ));
            step.action = Action::Blocked;
        }
    }
    plan.problems.extend(problems);
}

/// Returns the id of an object that a step deletes.
fn deleted_id(step: &Step) -> Option<String> {
    let is_deleted = matches!(step.action, Action::Delete | Action::Replace);
    step.observed.as_ref().filter(|_| is_deleted).map(|object| object.id.clone())
}

fn is_deleted(object: &Observed, plan: &Plan) -> bool {
    let deleting = plan.steps.iter().filter(|step| step.action == Action::Delete);
    deleting.filter_map(|step| step.observed.as_ref()).any(|other| {
        other.identity.kind == object.identity.kind
            && other.id == object.id
            && other.identity.namespace == object.identity.namespace
    })
}

/// Formats a difference.
fn describe(difference: &Difference) -> String {
    let value =
        |value: &Value| if value.is_null() { "none".to_owned() } else { escape_control(&compact(value)) };
    let Difference { field, from, to, .. } = difference;
    format!("{}: {} -> {}", escape_control(field), value(from), value(to))
}

impl Plan {
    /// Returns whether the plan changes the cluster.
    pub(super) fn has_changes(&self) -> bool {
        self.steps.iter().any(|step| step.action.is_change())
    }

    /// Returns the plan as a table.
    pub(super) fn table(&self) -> Table {
        let table = Table::new(&["ACTION", "KIND", "NAMESPACE", "NAME"], &["DIFFERENCES"]);
        table.rows(self.steps.iter().map(|step| {
            let differences: Vec<String> = step.differences.iter().map(describe).collect();
            [
                step.action.to_string(),
                step.identity.kind.to_string(),
                or_dash(step.identity.namespace.clone().unwrap_or_default()),
                step.identity.name.clone(),
                or_dash(differences.join(", ")),
            ]
        }))
    }

    /// Returns the plan for programs.
    pub(super) fn json(&self, set: &ObjectSet) -> Value {
        let steps = self.steps.iter().map(|step| {
            let differences = step.differences.iter().map(|difference| {
                json!({ "field": difference.field, "from": difference.from, "to": difference.to })
            });
            json!({
                "action": step.action.word(), "kind": step.identity.kind.word(), "namespace": step.identity.namespace,
                "name": step.identity.name, "differences": differences.collect::<Vec<_>>(),
            })
        });
        json!({
            "owner": set.owner, "set": set.name, "steps": steps.collect::<Vec<_>>(), "problems": self.problems,
            "kept": self.kept,
        })
    }

    /// Returns how many objects have each action, in one line.
    pub(super) fn summary(&self) -> String {
        let counts = Action::ALL.into_iter().filter_map(|action| {
            let count = self.steps.iter().filter(|step| step.action == action).count();
            (count > 0).then(|| format!("{count} {action}"))
        });
        let counts: Vec<String> = counts.collect();
        if counts.is_empty() { "nothing to do".to_owned() } else { counts.join(", ") }
    }
}

impl Step {
    /// Returns the mark that the object has after the step.
    pub(super) fn final_mark(&self, set: &ObjectSet) -> Option<Mark> {
        let declared = self.declared.as_ref()?;
        let mark = match (self.action, &self.observed) {
            (Action::Update | Action::Wait | Action::Unchanged, Some(object)) => object.mark.clone()?,
            (Action::Adopt, _) => Mark::new(set, false),
            _ => Mark::new(set, true),
        };
        Some(mark.with_entries(declared))
    }
}
