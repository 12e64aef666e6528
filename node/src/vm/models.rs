//! Which devices may be the screen or an interface of a machine: those that QEMU itself lists as such. Callers choose them
//! by name, and QEMU would take any device for either.

use std::collections::BTreeSet;

use muster_types::vm::{NicPlan, VmPlan};
use muster_types::{Error, Result};

use super::hardware;
use crate::command::{Commands, QUICK, Tool};

/// The names that QEMU has for devices of two kinds.
#[derive(Debug, Default)]
pub(super) struct Models {
    displays: BTreeSet<String>,
    networks: BTreeSet<String>,
}

impl Models {
    /// Asks QEMU.
    pub(super) fn ask(commands: &Commands) -> Result<Self> {
        let said = commands.run(Tool::QemuSystem, &["-device", "help"], "", QUICK)?;
        // Some releases write it to the one, some to the other.
        Ok(Self::read(if said.stdout.trim().is_empty() { &said.stderr } else { &said.stdout }))
    }

    fn read(help: &str) -> Self {
        let mut models = Self::default();
        let mut section = "";
        for line in help.lines() {
            let Some(rest) = line.strip_prefix("name \"") else {
                section = line.trim();
                continue;
            };
            let list = match section {
                "Display devices:" => &mut models.displays,
                "Network devices:" => &mut models.networks,
                _ => continue,
            };
            // The name, and an alias if it has one: every second piece between quotes, up to the description.
            let names = rest.split(", desc ").next().unwrap_or_default();
            list.extend(names.split('"').step_by(2).map(str::to_owned).filter(|name| !name.is_empty()));
        }
        models
    }

    /// Refuses a plan with a device that is something else than it is asked to be.
    pub(super) fn check(&self, plan: &VmPlan) -> Result<()> {
        if let Some(driver) = hardware::video_driver(&plan.video)
            && !self.displays.contains(&driver)
        {
            let model = &plan.video.model;
            return Err(Error::Conflict(format!("'{model}' is not a display device that QEMU knows")));
        }
        plan.nics.iter().try_for_each(|nic| self.check_nic(nic))
    }

    pub(super) fn check_nic(&self, nic: &NicPlan) -> Result<()> {
        if self.networks.contains(hardware::nic_driver(nic)) {
            return Ok(());
        }
        Err(Error::Conflict(format!("'{}' is not a network device that QEMU knows", nic.model)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_devices_of_both_kinds_are_read_from_the_help() {
        let models = Models::read(
            "Storage devices:\nname \"nvme\", bus PCI, desc \"disk\"\n\nNetwork devices:\n\
             name \"e1000\", bus PCI, alias \"e1000-82540em\", desc \"Intel \"x\"\"\nname \"rtl8139\", bus PCI\n\n\
             Display devices:\nname \"VGA\", bus PCI\n\nMisc devices:\nname \"pvpanic\", bus ISA\n",
        );
        let networks: Vec<&str> = models.networks.iter().map(String::as_str).collect();
        assert_eq!(networks, ["e1000", "e1000-82540em", "rtl8139"]);
        assert_eq!(models.displays.into_iter().collect::<Vec<_>>(), ["VGA"]);
    }
}
