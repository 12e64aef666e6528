//! Disks are what their plans say, and are never made twice or by halves.

use std::os::unix::fs::MetadataExt;
use std::process::Command;

use muster_types::ids::InstanceId;
use muster_types::instance::MachineType;
use muster_types::settings::Settings;
use muster_types::spec::{DiskBus, VideoSpec};
use muster_types::vm::ConsolePorts;

use super::*;
use crate::command::Commands;
use crate::image::Images;

const MIB: u64 = 1 << 20;

struct World {
    root: tempfile::TempDir,
    storage: FileStorage,
}

impl World {
    /// Nothing if this machine cannot look at images.
    fn new() -> Option<Self> {
        let root = tempfile::tempdir().unwrap();
        let images = Images::new(&Commands::find(), &Settings::defaults());
        if let Some(why) = images.limit() {
            muster_testing::skipped(&why);
            return None;
        }
        fs::create_dir(root.path().join("conversions")).unwrap();
        Some(Self { storage: FileStorage::new(root.path(), images), root })
    }

    fn folder(&self) -> PathBuf {
        self.root.path().join("machines/one")
    }

    fn path(&self, name: &str) -> String {
        self.folder().join(name).to_string_lossy().into_owned()
    }

    fn conversion(&self, blob: BlobId, kind: &str) -> PathBuf {
        self.root.path().join(format!("conversions/{blob}.{kind}"))
    }

    /// The conversion of a blob: a disk of 4 MiB full of sevens.
    fn base(&self) -> BlobId {
        let blob = BlobId::new();
        let raw = self.root.path().join("raw");
        fs::write(&raw, vec![7; 4 << 20]).unwrap();
        let (raw, to) = (raw.to_string_lossy(), self.conversion(blob, "qcow2"));
        run("qemu-img", &["convert", "-f", "raw", "-O", "qcow2", &raw, &to.to_string_lossy()]);
        fs::set_permissions(to, Permissions::from_mode(0o444)).unwrap();
        blob
    }

    fn build(&self, plan: &VmPlan) -> Result<()> {
        build(&self.folder(), plan, &Sources::new(&self.storage))
    }

    async fn copy(&self, device: &str, thin: bool, compress: bool) -> Result<String> {
        let to = self.root.path().join(format!("copy-{}", uuid::Uuid::new_v4()));
        snapshot_off(&self.storage, &self.folder(), device, (thin, compress), &to).await?;
        Ok(to.to_string_lossy().into_owned())
    }
}

fn run(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{arguments:?}: {said}{}", String::from_utf8_lossy(&output.stderr));
    said
}

/// What a guest would do to its disk.
fn write(disk: &str, commands: &[&str]) {
    let mut arguments = vec!["-f", "qcow2"];
    commands.iter().for_each(|command| arguments.extend(["-c", command]));
    arguments.push(disk);
    run("qemu-io", &arguments);
}

fn disk(device: &str, kind: DiskKind, size: Option<u64>, base: Option<BlobId>) -> DiskPlan {
    DiskPlan { device: device.into(), bus: DiskBus::Virtio, kind, size, base }
}

fn plan(disks: Vec<DiskPlan>) -> VmPlan {
    VmPlan {
        id: InstanceId::new(),
        name: "one".into(),
        cpus: 1,
        memory_mb: 128,
        machine_type: MachineType::Pc,
        uefi: false,
        secure_boot: false,
        nvram_template: None,
        disks,
        nics: Vec::new(),
        video: VideoSpec::default(),
        ports: ConsolePorts { console: 30000, vdi: 30001, vdi_tls: None },
        config_drive: None,
        side_channels: Vec::new(),
    }
}

#[test]
fn disks_are_made_once_and_keep_what_they_lie_on() {
    let Some(world) = World::new() else { return };
    let base = world.base();
    let plan = plan(vec![
        disk("vda", DiskKind::Disk, None, Some(base)),
        disk("vdb", DiskKind::Disk, Some(16 * MIB), Some(base)),
        disk("vdc", DiskKind::Disk, Some(8 * MIB), None),
        disk("sda", DiskKind::Cdrom, None, Some(base)),
        disk("sdb", DiskKind::Cdrom, None, None),
        disk("vdd", DiskKind::ConfigDrive, None, None),
    ]);
    world.build(&plan).unwrap();
    for (name, size) in [("vda.qcow2", 4 * MIB), ("vdb.qcow2", 16 * MIB), ("vdc.qcow2", 8 * MIB)] {
        assert!(run("qemu-img", &["check", "-f", "qcow2", &world.path(name)]).contains("No errors"));
        let said = run("qemu-img", &["info", "-f", "qcow2", "--output=json", &world.path(name)]);
        let said: serde_json::Value = serde_json::from_str(&said).unwrap();
        assert_eq!(said["virtual-size"], size, "{name}");
    }
    run("qemu-img", &["compare", &world.path("vda.qcow2"), &world.path("sda.base")]);
    assert_eq!(
        fs::metadata(world.path("vda.base")).unwrap().ino(),
        fs::metadata(world.conversion(base, "qcow2")).unwrap().ino()
    );
    let mut names: Vec<String> = fs::read_dir(world.folder())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    assert_eq!(names, ["sda.base", "vda.base", "vda.qcow2", "vdb.base", "vdb.qcow2", "vdc.qcow2"]);
    // What the guest wrote stays, without the conversion, too.
    write(&world.path("vda.qcow2"), &["write -P 9 0 4k"]);
    fs::remove_file(world.conversion(base, "qcow2")).unwrap();
    world.build(&plan).unwrap();
    write(&world.path("vda.qcow2"), &["read -P 9 0 4k", "read -P 7 4k 1M"]);
    write(&world.path("vdb.qcow2"), &["read -P 7 0 4M", "read -P 0 4M 12M"]);
}

#[test]
fn an_optical_disc_is_one() {
    let Some(world) = World::new() else { return };
    let blob = BlobId::new();
    let mut data = vec![0; 1 << 20];
    data[0x8000..0x8006].copy_from_slice(b"\x01CD001");
    fs::write(world.conversion(blob, "iso"), &data).unwrap();
    let cdrom = disk("sda", DiskKind::Cdrom, None, Some(blob));
    world.build(&plan(vec![cdrom, disk("vda", DiskKind::Disk, Some(2 * MIB), Some(blob))])).unwrap();
    assert!(fs::read(world.path("sda.iso")).unwrap() == data);
    let out = world.path("out");
    run("qemu-img", &["convert", "-f", "qcow2", "-O", "raw", &world.path("vda.qcow2"), &out]);
    assert!(fs::read(out).unwrap().starts_with(&data));
}

#[test]
fn what_cannot_be_is_refused_with_the_reason() {
    let Some(world) = World::new() else { return };
    let base = world.base();
    let refusal = |disk: DiskPlan| world.build(&plan(vec![disk])).unwrap_err();
    let small = refusal(disk("vda", DiskKind::Disk, Some(MIB), Some(base)));
    assert!(
        matches!(&small, Error::Invalid(why) if why.contains("1048576") && why.contains("4194304")),
        "{small}"
    );
    assert!(matches!(refusal(disk("vdb", DiskKind::Disk, None, None)), Error::Invalid(_)));
    assert!(matches!(refusal(disk("vdc", DiskKind::Disk, None, Some(BlobId::new()))), Error::Unavailable(_)));
    assert!(matches!(refusal(disk("../x", DiskKind::Disk, Some(MIB), None)), Error::Invalid(_)));
    assert_eq!(fs::read_dir(world.folder()).unwrap().count(), 1, "only the base of vda");
}

#[test]
fn what_a_killed_build_left_is_not_taken_for_whole() {
    let Some(world) = World::new() else { return };
    let plan = plan(vec![disk("vda", DiskKind::Disk, None, Some(world.base()))]);
    fs::create_dir_all(world.folder()).unwrap();
    for name in [".vda.qcow2.new", ".vda.base.new"] {
        fs::write(world.path(name), "half").unwrap();
    }
    world.build(&plan).unwrap();
    write(&world.path("vda.qcow2"), &["read -P 7 0 4M"]);
    assert_eq!(fs::read_dir(world.folder()).unwrap().count(), 2);
}

#[test]
fn what_is_no_plain_file_is_not_followed() {
    let Some(world) = World::new() else { return };
    let plan = plan(vec![disk("vda", DiskKind::Disk, Some(MIB), None)]);
    fs::create_dir_all(world.folder()).unwrap();
    let other = world.root.path().join("other");
    fs::write(&other, "mine").unwrap();
    std::os::unix::fs::symlink(&other, world.path("vda.qcow2")).unwrap();
    assert!(matches!(world.build(&plan), Err(Error::Internal(_))));
    fs::remove_file(world.path("vda.qcow2")).unwrap();
    std::os::unix::fs::symlink(&other, world.path(".vda.qcow2.new")).unwrap();
    world.build(&plan).unwrap();
    assert_eq!(fs::read(other).unwrap(), b"mine");
}

#[test]
fn the_memory_of_the_firmware_begins_as_its_package_or_a_template_says() {
    let Some(world) = World::new() else { return };
    let firmware = world.root.path().join("firmware");
    fs::create_dir(&firmware).unwrap();
    let sources = Sources { storage: &world.storage, firmware: &firmware };
    let mut plan = plan(Vec::new());
    plan.uefi = true;
    let refused = build(&world.folder(), &plan, &sources).unwrap_err();
    assert!(matches!(&refused, Error::Conflict(why) if why.contains("Debian package ovmf")), "{refused}");
    fs::write(firmware.join("OVMF_VARS_4M.fd"), vec![1; 4096]).unwrap();
    fs::write(firmware.join("OVMF_VARS_4M.ms.fd"), vec![2; 4096]).unwrap();
    let nvram = || fs::read(world.folder().join(NVRAM)).unwrap();
    build(&world.folder(), &plan, &sources).unwrap();
    assert_eq!(nvram(), [1; 4096]);
    // It is the machine's own from now on.
    fs::write(world.folder().join(NVRAM), "the guest's").unwrap();
    plan.secure_boot = true;
    build(&world.folder(), &plan, &sources).unwrap();
    assert_eq!(nvram(), b"the guest's");
    fs::remove_file(world.folder().join(NVRAM)).unwrap();
    build(&world.folder(), &plan, &sources).unwrap();
    assert_eq!(nvram(), [2; 4096]);
    fs::remove_file(world.folder().join(NVRAM)).unwrap();

    let template = BlobId::new();
    plan.nvram_template = Some(template);
    assert!(matches!(build(&world.folder(), &plan, &sources), Err(Error::Unavailable(_))));
    let name = template.to_string();
    let blob = world.root.path().join("blobs").join(&name[..2]);
    fs::create_dir_all(&blob).unwrap();
    fs::write(blob.join(&name), vec![3; 100]).unwrap();
    let refused = build(&world.folder(), &plan, &sources).unwrap_err();
    assert!(
        matches!(&refused, Error::Invalid(why) if why.contains("100") && why.contains("4096")),
        "{refused}"
    );
    fs::write(blob.join(&name), vec![3; 4096]).unwrap();
    build(&world.folder(), &plan, &sources).unwrap();
    assert_eq!(nvram(), [3; 4096]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_of_a_disk_is_the_disk_and_a_thin_one_is_what_differs() {
    let Some(world) = World::new() else { return };
    let base = world.base();
    let disks = vec![
        disk("vda", DiskKind::Disk, Some(16 * MIB), Some(base)),
        disk("vdb", DiskKind::Disk, Some(16 * MIB), None),
    ];
    world.build(&plan(disks)).unwrap();
    let top = world.path("vda.qcow2");
    // Where the base has something and the guest wrote nothing but zeroes, the copy has zeroes.
    write(&top, &["write -P 9 1M 100k", "write -z 2M 1M", "write -P 8 12M 64k"]);
    write(&world.path("vdb.qcow2"), &["write -P 5 3M 64k"]);
    let folder = fs::Permissions::from_mode(0o700);
    fs::set_permissions(world.folder(), folder).unwrap();
    let under = world.conversion(base, "qcow2");
    for compress in [false, true] {
        let whole = world.copy("vda", false, compress).await.unwrap();
        run("qemu-img", &["compare", &whole, &top]);
        let thin = world.copy("vda", true, compress).await.unwrap();
        for copy in [&whole, &thin] {
            let facts = world.storage.facts(Path::new(copy)).unwrap();
            assert_eq!((facts.format, facts.virtual_size), (ImageFormat::Qcow2, 16 * MIB));
            run("qemu-img", &["check", "-f", "qcow2", copy]);
        }
        let sizes = [&whole, &thin].map(|copy| fs::metadata(copy).unwrap().blocks());
        assert!(compress || sizes[1] < sizes[0], "{sizes:?}");
        run(
            "qemu-img",
            &["rebase", "-u", "-f", "qcow2", "-F", "qcow2", "-b", &under.to_string_lossy(), &thin],
        );
        run("qemu-img", &["compare", &thin, &top]);
    }
    // A disk that lies on nothing has only what is its own.
    let thin = world.copy("vdb", true, false).await.unwrap();
    run("qemu-img", &["compare", &thin, &world.path("vdb.qcow2")]);
    assert!(matches!(world.copy("vdz", false, false).await, Err(Error::Conflict(_))));
    assert_eq!(fs::read_dir(world.root.path().join("work")).unwrap().count(), 0);
}
