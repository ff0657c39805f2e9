"""Lines that mend what is around the weights, by kind and library; the names in them are told in `remedies`."""

from __future__ import annotations

from .remedy_weights import Lines

AROUND: dict[str, Lines] = {
    "scheduler-unit": {
        "pytorch": """
            updates = math.ceil(len(loader) / $A) * epochs  # the scheduler's length
            if (i + 1) % $A == 0 or i + 1 == len(loader):
                optimizer.step()
                scheduler.step()  # once per update
            """,
        "accelerate": """
            # a prepared scheduler steps num_processes times per update: leave it out
            # of prepare(), and give its length in updates
            if accelerator.sync_gradients:
                scheduler.step()
            """,
        "lightning": """
            # in configure_optimizers
            updates = self.trainer.estimated_stepping_batches  # the scheduler's length
            scheduler = {"scheduler": scheduler, "interval": "step"}  # an update
            return {"optimizer": optimizer, "lr_scheduler": scheduler}
            """,
        "transformers": """
            # the Trainer steps it once per update: give its length in updates, and
            # call no scheduler.step() of your own
            trainer = Trainer(..., optimizers=(optimizer, scheduler))
            """,
    },
    "skip-advances-scheduler": {
        "pytorch": """
            scale = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            if scaler.get_scale() >= scale:  # smaller: the update was skipped
                scheduler.step()
            """,
        "accelerate": """
            optimizer.step()
            if not accelerator.optimizer_step_was_skipped:
                scheduler.step()
            """,
        "fabric": """
            scaler = fabric.strategy.precision.scaler
            scale = scaler.get_scale()
            optimizer.step()
            if scaler.get_scale() >= scale:  # smaller: the update was skipped
                scheduler.step()
            """,
        "lightning": """
            def lr_scheduler_step(self, scheduler, metric):
                scale = self.trainer.precision_plugin.scaler.get_scale()
                if scale >= getattr(self, "last_scale", 2.0**16):  # smaller: skipped
                    scheduler.step()
                self.last_scale = scale
            """,
        "transformers": """
            # the Trainer leaves the scheduler alone after a skipped update:
            # call no scheduler.step() of your own
            trainer = Trainer(..., optimizers=(optimizer, scheduler))
            """,
    },
    "clip-before-unscale": {
        "pytorch": """
            scaler.unscale_(optimizer)  # first
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            scaler.step(optimizer)
            scaler.update()
            """,
        "accelerate": """
            accelerator.clip_grad_norm_(model.parameters(), max_norm)  # unscales first
            """,
        "fabric": """
            fabric.clip_gradients(model, optimizer, max_norm=max_norm)  # unscales first
            """,
        "lightning": """
            trainer = Trainer(gradient_clip_val=max_norm)  # after the scale is undone
            """,
        "transformers": """
            args = TrainingArguments(..., max_grad_norm=max_norm)  # unscales first
            """,
    },
    "clip-per-microbatch": {
        "pytorch": """
            for batch in batches:
                (loss_sum(model, batch) / tokens).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)  # once
            optimizer.step()
            """,
        "accelerate": """
            if accelerator.sync_gradients:  # after the last microbatch
                accelerator.clip_grad_norm_(model.parameters(), max_norm)
            """,
        "fabric": """
            for batch in batches:
                fabric.backward(loss_sum(model, batch) / tokens)
            fabric.clip_gradients(model, optimizer, max_norm=max_norm)  # once
            optimizer.step()
            """,
        "lightning": """
            trainer = Trainer(gradient_clip_val=max_norm)  # once per update
            """,
        "transformers": """
            args = TrainingArguments(..., max_grad_norm=max_norm)  # once per update
            """,
    },
    "scaler-disagrees": {
        "pytorch": """
            scaler.step(optimizer)  # on gradients that are reduced over all ranks
            scaler.update()
            scale = torch.tensor(scaler.get_scale(), device=device)
            dist.all_reduce(scale, op=dist.ReduceOp.MIN)
            scaler.update(scale.item())  # one scale for all
            """,
    },
    "sync-every-microbatch": {
        "pytorch": """
            for batch in batches:
                (loss_sum(model, batch) / tokens).backward()
            for p in model.parameters():  # after the last microbatch only
                dist.all_reduce(p.grad)
            """,
        "ddp": """
            for i, batch in enumerate(batches, 1):
                with model.no_sync() if i < len(batches) else nullcontext():
                    loss = compute_loss(model, batch)  # forward too, not only backward
                    loss.backward()
            """,
        "accelerate": """
            with accelerator.accumulate(model):  # forward too, not only backward
                loss = compute_loss(model, batch)
                accelerator.backward(loss)
            """,
        "fabric": """
            for i, batch in enumerate(batches, 1):
                with fabric.no_backward_sync(model, enabled=i < len(batches)):
                    loss = compute_loss(model, batch)  # forward too, not only backward
                    fabric.backward(loss)
            """,
        "lightning": """
            trainer = Trainer(accumulate_grad_batches=$A)  # syncs once per update
            """,
        "transformers": """
            config = {"gradient_accumulation_kwargs": {"sync_each_batch": False}}
            args = TrainingArguments(..., accelerator_config=config)
            """,
    },
    "retained-graph": {
        "pytorch": """
            total_loss += loss.detach()  # not loss: it keeps its whole graph
            history.append(loss.item())
            """,
    },
    "low-precision-sum": {
        "pytorch": """
            model.float()  # gradients are summed in the precision of their parameters
            with torch.autocast(device_type, dtype=torch.bfloat16):
                loss = compute_loss(model, batch)
            loss.backward()
            """,
        "accelerate": """
            model.float()  # gradients are summed in the precision of their parameters
            accelerator = Accelerator(mixed_precision="bf16")
            """,
        "fabric": """
            fabric = Fabric(precision="bf16-mixed")  # not "bf16-true"
            """,
        "lightning": """
            trainer = Trainer(precision="bf16-mixed")  # not "bf16-true"
            """,
        "transformers": """
            model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
            args = TrainingArguments(..., bf16=True)  # autocast
            """,
    },
    "batchnorm": {
        "pytorch": """
            # after model.train(); or use GroupNorm. SyncBatchNorm joins ranks, never
            # microbatches
            for module in model.modules():
                if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
                    module.eval()
            """,
    },
    "wrong-log": {
        "pytorch": """
            total = 0.0
            for batch in batches:
                loss = loss_sum(model, batch)
                (loss / tokens).backward()
                total += loss.detach()
            print(float(total) / tokens)  # the loss of the update
            """,
        "ddp": """
            total = sum(losses)  # the detached sums of this rank's microbatches
            dist.all_reduce(total)
            print(float(total) / tokens)  # tokens: of all ranks
            """,
        "accelerate": """
            total = sum(losses)  # the detached sums of this rank's microbatches
            total = accelerator.reduce(total, reduction="sum")
            accelerator.print(float(total) / tokens)  # tokens: of all ranks
            """,
        "fabric": """
            total = sum(losses)  # the detached sums of this rank's microbatches
            total = fabric.all_reduce(total, reduce_op="sum")
            fabric.print(float(total) / tokens)  # tokens: of all ranks
            """,
        "lightning": """
            # where the update ends; losses: the detached sums of its microbatches
            total = self.all_gather(sum(losses)).sum()
            self.log("train_loss", total / tokens)  # tokens: of all ranks
            """,
        "transformers": """
            # in a compute_loss of your own; losses: the detached sums of the update
            total = self.accelerator.reduce(sum(losses), reduction="sum")
            self.log({"update_loss": float(total / num_items_in_batch)})
            """,
    },
    "no-update": {
        "pytorch": """
            assert all(group["lr"] > 0 for group in optimizer.param_groups)
            loss.backward()  # gradients first,
            optimizer.step()  # then the update,
            optimizer.zero_grad()  # then none of them is left
            """,
        "accelerate": """
            # optimizer.step() does nothing within a group: run it in accumulate(), and
            # prepare the optimizer with the model whose parameters it holds
            model, optimizer = accelerator.prepare(model, optimizer)
            with accelerator.accumulate(model):
                accelerator.backward(compute_loss(model, batch))
                optimizer.step()
            """,
        "fabric": """
            model, optimizer = fabric.setup(model, optimizer)
            fabric.backward(loss)  # gradients first,
            optimizer.step()  # then the update,
            optimizer.zero_grad()  # then none of them is left
            """,
        "lightning": """
            # training_step returns the loss; None skips the microbatch. Under manual
            # optimization it runs the optimizer itself:
            self.manual_backward(loss)
            self.optimizers().step()
            self.optimizers().zero_grad()
            """,
        "transformers": """
            # a learning rate above 0 from the first update on, and trainable parameters
            args = TrainingArguments(..., learning_rate=5e-5, warmup_steps=0)
            assert any(p.requires_grad for p in model.parameters())
            """,
    },
    "dropout-shared": {
        "pytorch": """
            torch.manual_seed(seed)  # the same: builds the same model everywhere
            model = build()
            torch.manual_seed(seed + dist.get_rank())  # then each rank draws its own
            """,
        "accelerate": """
            set_seed(seed)  # the same: builds the same model everywhere
            model = build()
            set_seed(seed, device_specific=True)  # then each rank draws its own
            """,
        "fabric": """
            fabric.seed_everything(seed)  # the same: builds the same model everywhere
            model = build()
            fabric.seed_everything(seed + fabric.global_rank)  # then each its own
            """,
        "lightning": """
            def on_train_start(self):  # once the model is built
                seed_everything(seed + self.global_rank)
            """,
        "transformers": """
            class OwnDraws(TrainerCallback):  # the Trainer seeds all ranks alike
                def on_train_begin(self, args, state, control, **kwargs):
                    torch.manual_seed(args.seed + args.process_index)

            trainer = Trainer(..., callbacks=[OwnDraws()])
            """,
    },
    "parameters-missing": {
        "pytorch": """
            held = {id(p) for group in optimizer.param_groups for p in group["params"]}
            trained = [p for p in model.parameters() if p.requires_grad]
            missing = [p for p in trained if id(p) not in held]
            optimizer.add_param_group({"params": missing})
            # or, for what is not to be trained: module.requires_grad_(False)
            """,
        "transformers": """
            # the Trainer builds its optimizer from the model that it gets:
            # add modules and unfreeze parameters before
            model.requires_grad_(True)
            trainer = Trainer(model=model, args=args, train_dataset=dataset)
            """,
    },
}
